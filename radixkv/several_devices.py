"""What makes the steps of a pool whose layers lie on several devices: for each device a backend, a plan and a step of its own.

A pool on one device has none of this: its backend and its steps are those of attention.py and step.py themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor

from radixkv.attention import Backend, choose_backend
from radixkv.pool import BlockPool
from radixkv.sequence import Sequence
from radixkv.step import Step
from radixkv.step_maker import StepMaker


class SpreadBackend:
    """A backend for each device of a pool.

    Args:
        name: what is asked for on each device; "auto" may be another one on each.
        num_heads, pool, exact: as for `Backend`.

    Attributes:
        name: the implementations that run, "torch", "triton" or "torch and triton". launches: of all devices together. exact: as given.
        by_device: the backends.
    """

    def __init__(self, name: str, *, num_heads: int, pool: BlockPool, exact: bool = False):
        self.by_device = {
            device: Backend(choose_backend(name, device).name, num_heads=num_heads, pool=pool.seen_from(device), exact=exact)
            for device in dict.fromkeys(pool.devices)
        }
        self.name = " and ".join(sorted({backend.name for backend in self.by_device.values()}))
        self.exact = exact
        self.launches: Counter[str] = Counter()
        for backend in self.by_device.values():
            backend.launches = self.launches

    def copy_blocks(self, pools: Seq[tuple[Tensor, Tensor]], src: Tensor, dst: Tensor, num_tokens: Tensor) -> None:
        """As the kernel of that name, on each device in one launch."""
        for device, backend in self.by_device.items():
            here = [pair for pair in pools if pair[0].device == device]
            backend.copy_blocks(here, src.to(device), dst.to(device), num_tokens.to(device))


AnyBackend = Backend | SpreadBackend


def make_backend(name: str, *, num_heads: int, pool: BlockPool, exact: bool = False) -> AnyBackend:
    """The backend of a pool, on one device or on several; arguments as for `SpreadBackend`.

    Raises:
        ValueError: `name` is unknown, or cannot run on one of the devices.
    """
    if len(set(pool.devices)) > 1:
        return SpreadBackend(name, num_heads=num_heads, pool=pool, exact=exact)
    return Backend(choose_backend(name, pool.device).name, num_heads=num_heads, pool=pool, exact=exact)


class SpreadStep(Step):
    """One forward step over a pool on several devices: each layer stores and attends in the step of its device.

    Args:
        pool: where K/V lives. backend: what runs. by_device: the steps, each with a plan on its device.

    Attributes:
        plan, positions: on the device of the first layer.
    """

    def __init__(self, pool: BlockPool, backend: SpreadBackend, by_device: Mapping[torch.device, Step]):
        self.pool, self.backend = pool, backend  # type: ignore[assignment]
        self._by_layer = [by_device[device] for device in pool.devices]
        self._steps = list(by_device.values())
        self.positions = self._by_layer[0].positions
        self.fuses_rotation = all(step.fuses_rotation for step in self._steps)

    @property
    def plan(self):  # type: ignore[override]
        return self._by_layer[0].plan

    @property
    def num_stored_layers(self) -> int:
        return sum(step.num_stored_layers for step in self._steps)

    @property
    def num_attended_layers(self) -> int:  # type: ignore[override]
        return sum(step.num_attended_layers for step in self._steps)

    @property
    def is_complete(self) -> bool:
        return self.num_stored_layers == self.num_attended_layers == self.pool.num_layers

    def begin(self) -> None:
        for step in self._steps:
            step.begin()

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._by_layer[layer].store(layer, key, value)

    def rotate_and_store(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, *, in_place: bool
    ) -> Tensor:
        return self._by_layer[layer].rotate_and_store(layer, query, key, value, cos, sin, in_place=in_place)

    def attend(self, layer: int, query: Tensor, *, scale: float, sliding_window: int | None, softcap: float | None) -> Tensor:
        return self._by_layer[layer].attend(layer, query, scale=scale, sliding_window=sliding_window, softcap=softcap)


class SpreadStepMaker:
    """What `StepMaker` is, with one for each device.

    Args:
        pool: where K/V lives. backend: what runs.
    """

    def __init__(self, pool: BlockPool, backend: SpreadBackend):
        self._pool, self._backend = pool, backend
        self._makers = {device: StepMaker(pool.seen_from(device), own) for device, own in backend.by_device.items()}

    def prompt(self, sequences: list[Sequence], carried: dict) -> AbstractContextManager[Step]:
        """See `StepMaker.prompt`."""
        return self._make(lambda maker, kept: maker.prompt(sequences, kept), carried)

    def decode(self, sequences: list[Sequence], carried: dict, num_rows: int | None) -> AbstractContextManager[Step]:
        """See `StepMaker.decode`."""
        return self._make(lambda maker, kept: maker.decode(sequences, kept, num_rows), carried)

    @contextmanager
    def _make(self, make: Callable[[StepMaker, dict], AbstractContextManager[Step]], carried: dict) -> Iterator[Step]:
        with ExitStack() as stack:
            by_device = {
                device: stack.enter_context(make(maker, carried.setdefault(device, {}))) for device, maker in self._makers.items()
            }
            yield SpreadStep(self._pool, self._backend, by_device)


def make_steps(pool: BlockPool, backend: AnyBackend) -> StepMaker | SpreadStepMaker:
    """What makes the steps of a pool."""
    return SpreadStepMaker(pool, backend) if isinstance(backend, SpreadBackend) else StepMaker(pool, backend)
