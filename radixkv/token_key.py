"""Tokens as bytes, the form in which the tree stores and compares them.

A key is the little-endian int32 bytes of the token ids. One `startswith` on two keys is one memcmp; it is built once
per request and handed around.
"""

from __future__ import annotations

from array import array
from typing import Any, SupportsIndex

import numpy as np

TOKEN_BYTES = 4
_FIRST_WINDOW_BYTES = 256
_NUMPY_WINDOW_TOKENS = 1024


def token_key(tokens: Any) -> bytes:
    """Turns token ids into the bytes of their int32 values.

    Args:
        tokens: a list, tuple or range of ints, a 1-D numpy array or torch tensor of integers, a `TokenKey`, or a key that
            this function made before, which comes back as it is. Ids are in 0 .. 2**31 - 1.

    Returns:
        4 bytes per token, little-endian.

    Raises:
        ValueError: for a negative id, an id of 2**31 or more, floats, bools, more than one dimension, anything else.
    """
    if isinstance(tokens, bytes):
        if len(tokens) % TOKEN_BYTES:
            raise ValueError(f"token_key: a key has 4 bytes per token, got {len(tokens)} bytes")
        return tokens
    if isinstance(tokens, TokenKey):
        return bytes(tokens)
    if isinstance(tokens, (list, tuple, range)):
        return _key_of_sequence(tokens)
    if hasattr(tokens, "detach"):
        if tokens.is_floating_point() or tokens.is_complex():
            raise ValueError(f"token_key: tokens must be integers, got dtype {tokens.dtype}")
        tokens = tokens.detach().cpu().numpy()
    if isinstance(tokens, np.ndarray):
        return _key_of_array(tokens)
    raise ValueError(f"token_key: tokens must be a list, tuple, 1-D array or tensor of ints, or bytes, got {type(tokens).__name__}")


class TokenKey:
    """A key that is built once per request and grows while tokens are generated.

    It stands wherever tokens do and is not converted again there; what was appended since the last time is joined on.

    Args:
        tokens: the first tokens, see `token_key`.

    Raises:
        ValueError: for what `token_key` refuses.
    """

    __slots__ = ("_joined", "_appended")

    def __init__(self, tokens: Any = ()) -> None:
        self._joined = token_key(tokens)
        self._appended = bytearray()

    def append(self, token_id: SupportsIndex) -> None:
        """Adds one token, in time that does not depend on the length.

        Args:
            token_id: an int (or a numpy or torch integer) in 0 .. 2**31 - 1.

        Raises:
            ValueError: for anything else; nothing is added.
        """
        if type(token_id) is int and 0 <= token_id < 2**31:
            self._appended += token_id.to_bytes(TOKEN_BYTES, "little")
        else:
            self.extend([token_id])

    def extend(self, tokens: Any) -> None:
        """Adds tokens.

        Args:
            tokens: see `token_key`.

        Raises:
            ValueError: for what it refuses; nothing is added.
        """
        self._appended += token_key(tokens)

    def __bytes__(self) -> bytes:
        if self._appended:
            self._joined += bytes(self._appended)
            self._appended.clear()
        return self._joined

    def __len__(self) -> int:
        return (len(self._joined) + len(self._appended)) // TOKEN_BYTES

    def __eq__(self, other: object) -> bool:
        return bytes(self) == bytes(other) if isinstance(other, TokenKey) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"TokenKey({len(self)} tokens)"


def namespace_key(namespace: tuple) -> tuple:
    """The namespace with the types of its elements, because 1, 1.0 and True are equal to a dict."""
    if namespace == ():
        return ()
    if not isinstance(namespace, tuple):
        raise ValueError(f"namespace must be a tuple, got {type(namespace).__name__}")
    return tuple((type(part), namespace_key(part) if isinstance(part, tuple) else part) for part in namespace)


def require_namespace(function: str, namespace: tuple) -> None:
    """Raise ValueError unless namespace is a tuple that can be looked up."""
    if not isinstance(namespace, tuple):
        raise ValueError(f"{function}: namespace must be a tuple, got {type(namespace).__name__}")
    try:
        hash(namespace)
    except TypeError as error:
        raise ValueError(f"{function}: namespace must hold hashable values only: {error}") from None


def namespace_of(key: tuple) -> tuple:
    """The namespace that `namespace_key` made the key of."""
    return tuple(namespace_of(part) if kind is tuple else part for kind, part in key)


def common_bytes(edge: bytes | bytearray, key: bytes | bytearray, start: int) -> int:
    """Length of the longest common prefix of `edge` and `key[start:]`, in bytes of whole tokens."""
    length = min(len(edge), len(key) - start)
    common = common_bytes_short(edge[:_FIRST_WINDOW_BYTES], key[start : start + _FIRST_WINDOW_BYTES])
    if common < _FIRST_WINDOW_BYTES or common >= length:
        return common
    num_tokens = length // TOKEN_BYTES
    edge_ids = np.frombuffer(edge, np.int32, num_tokens)
    key_ids = np.frombuffer(key, np.int32, num_tokens, start)
    first, window = _FIRST_WINDOW_BYTES // TOKEN_BYTES, _NUMPY_WINDOW_TOKENS
    while first < num_tokens:
        different = edge_ids[first : first + window] != key_ids[first : first + window]
        mismatch = int(different.argmax())
        if different[mismatch]:
            return (first + mismatch) * TOKEN_BYTES
        first += window
        window *= 4
    return num_tokens * TOKEN_BYTES


def common_bytes_short(left: bytes | bytearray, right: bytes | bytearray) -> int:
    """The same for two short keys, with no array in between: in their difference as one number, the highest byte that is not zero."""
    length = min(len(left), len(right))
    different = int.from_bytes(left[:length], "big") ^ int.from_bytes(right[:length], "big")
    return (length - (different.bit_length() + 7) // 8) // TOKEN_BYTES * TOKEN_BYTES


def _key_of_sequence(tokens: list[int] | tuple[int, ...] | range) -> bytes:
    try:
        ids = np.asarray(array("q", tokens))
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token_key: tokens must be one flat sequence of ints below 2**31: {error}") from None
    # A bool is an int to Python, with the value 0 or 1, so only those few need a look.
    for position in np.flatnonzero(ids <= 1).tolist():
        if isinstance(tokens[position], bool):
            raise ValueError(f"token_key: tokens must be ints, got a bool at position {position}")
    return _key_of_array(ids)


def _key_of_array(ids: np.ndarray) -> bytes:
    if ids.ndim != 1:
        raise ValueError(f"token_key: tokens must be one-dimensional, got shape {list(ids.shape)}")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"token_key: tokens must be integers, got dtype {ids.dtype}")
    if ids.size and (ids.min() < 0 or ids.max() >= 2**31):
        raise ValueError("token_key: token ids must be in 0 .. 2**31 - 1")
    return ids.astype("<i4").tobytes()
