"""What a file says of where it came from: namespaces come back, and another cache's file is refused by name."""

from __future__ import annotations

import json

import pytest
import torch

from radixkv.saved_facts import decode_namespace, encode_namespace
from tests.persisted import (
    contents,
    filled,
    ids_of,
    make_cache,
    prefixes,
    store,
)

NAMESPACE = ("a", 1, True, 1.0, None, b"\x00", "", ("nested", (2.5, ())), float("inf"))


def test_namespaces_come_back_with_their_types(tmp_path):
    assert decode_namespace(json.loads(json.dumps(encode_namespace(NAMESPACE)))) == NAMESPACE
    cache, other = make_cache(), make_cache()
    namespaces = [(), (1,), (True,), (1.0,), ("1",), NAMESPACE]
    for i, namespace in enumerate(namespaces):
        store(cache, ids_of(20 + i, 1), namespace)
    cache.save(tmp_path / "prefixes")
    other.load(tmp_path / "prefixes")
    assert prefixes(other) == prefixes(cache)
    assert [other.match_prefix(ids_of(40, 1), namespace).length for namespace in namespaces] == [20, 21, 22, 23, 24, 25]


def test_a_namespace_that_has_no_form_is_named(tmp_path):
    cache = make_cache()
    store(cache, ids_of(20, 1), ("a", frozenset({1})))
    with pytest.raises(ValueError, match=r"namespace .*frozenset.* cannot be saved: its elements must be str, int"):
        cache.save(tmp_path / "prefixes")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ['[["set", 1]]', '[["int", true]]', '[["int", "1"]]', '[["float", "x"]]', "[1]", '[["bytes", "zz"]]'])
def test_namespaces_that_were_not_encoded_here(text):
    with pytest.raises((ValueError, TypeError)):
        decode_namespace(json.loads(text))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": torch.float16}, 'dtype is "float32" in the file and "float16" here'),
        ({"num_layers": 3}, "num_layers is 2 in the file and 3 here"),
        ({"namespace": ("other",)}, r'namespace is \[\] in the file and \[\["str", "other"\]\] here'),
    ],
)
def test_another_pool_is_named(tmp_path, settings, message):
    filled().save(tmp_path / "prefixes")
    other = filled(**settings)
    before = contents(other)
    with pytest.raises(ValueError, match=f"prefixes was saved by another model.*nothing was loaded: {message}$"):
        other.load(tmp_path / "prefixes")
    assert contents(other) == before


@pytest.mark.parametrize(
    ("saved", "present", "message"),
    [
        ({"a": 1}, {"a": 2}, "a is 1 in the file and 2 here"),
        ({"a": 1}, {}, "a is 1 in the file and missing here"),
        ({}, {"a": 1}, "a is missing in the file and 1 here"),
        ({"a": 1}, {"a": True}, "a is 1 in the file and true here"),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, "a.b.c is 1 in the file and 2 here"),
        ({"a": {"b": None}}, {"a": {"b": 2}}, "a.b is null in the file and 2 here"),
        ({"a": {"b": 1}}, {"a": {"b": None}}, "a.b is 1 in the file and null here"),
        ({"a": 1, "b": 1}, {"a": 2, "b": 2}, "a is 1 in the file and 2 here; b is 1 in the file and 2 here"),
    ],
)
def test_every_difference_of_fingerprints_is_named(tmp_path, saved, present, message):
    cache = filled()
    cache.save(tmp_path / "prefixes", fingerprint=saved)
    with pytest.raises(ValueError, match=f"nothing was loaded: {message}$"):
        cache.load(tmp_path / "prefixes", fingerprint=present)


def test_fingerprints_that_fit(tmp_path):
    cache = filled()
    cache.save(tmp_path / "prefixes", fingerprint={"a": (1, {"b": None}), "c": 1})
    make_cache().load(tmp_path / "prefixes", fingerprint={"c": None, "a": [1, {"b": None}]})
    with pytest.raises(ValueError, match="fingerprint: field 'a' must hold only what JSON can"):
        cache.save(tmp_path / "prefixes", fingerprint={"a": {1, 2}})
    with pytest.raises(ValueError, match="fingerprint: dtype is taken by radixkv"):
        cache.save(tmp_path / "prefixes", fingerprint={"dtype": "x"})
