"""Float8 copies of weights, kept between calls and made again when the weights change."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from tilewright.hardware.device_cache import DeviceCache

Cast = tuple[Tensor, Tensor]
"""e4m3 and the scales of its blocks."""


class _Source(NamedTuple):
    """What a copy was made of, and how.  trained: does an optimizer write the weights, which may hold other tensors?"""

    weights: tuple["weakref.ref[Tensor]", ...]
    storages: tuple[StorageWeakRef, ...]
    cast: Callable[..., Cast]
    trained: bool


class WeightCasts:
    """Float8 copies by name, each kept while the weights that it was made of are what they were: until torch counts a
    write to one, one is other memory, or an optimizer that holds one took a step.

    A trained weight that no optimizer holds is written through a master copy elsewhere: there any step counts.  Writes
    that nobody counts, through `weight.data` or by the replay of a CUDA graph, need `requantise()` after them.
    A copy that a CUDA graph reads is made again in the same memory, and at once where a step, a loaded state_dict or
    `requantise()` says so, because replays ask for nothing.  Once a graph under capture trains the weights, copies are
    made in every call: its replays write unseen.

    They are neither copied nor pickled with the module that holds them, but made again.
    """

    def __init__(self) -> None:
        self._cache: DeviceCache[Cast] = DeviceCache("float8 weights")
        self._sources: dict[str, _Source] = {}
        self._writes = 0  # that torch does not count
        self._written_by_graphs = self._held = False

    def of(self, name: str, weights: Sequence[Tensor], cast: Callable[..., Cast], *, trained: bool = False) -> Cast:
        """What `cast(*weights)` gave for these weights, or gives now.  trained: do they want gradients, in training?"""
        storages = tuple([StorageWeakRef(w.untyped_storage()) for w in weights])
        if self._written_by_graphs:
            self._writes += 1

        def make() -> Cast:
            self._sources[name] = _Source(tuple([weakref.ref(w) for w in weights]), storages, cast, trained)
            _watch(self)
            return cast(*[w.detach() for w in weights])

        place = (storages, *[(w.storage_offset(), w.shape, w.dtype) for w in weights])
        state = (self._writes, *[-1 if w.is_inference() else w._version for w in weights])
        return self._cache.get(name, weights[0].device, make, place=place, state=state)

    def last(self, name: str) -> Cast | None:
        """What `of` gave last, of whatever weights: for traced code, which cannot look at versions."""
        return self._cache.peek(name)

    def trained_by_graph(self) -> None:
        """Note that a graph under capture trains the weights."""
        self._written_by_graphs = True

    def requantise(self) -> None:
        """`written`, after which no graph trains the weights any more, so that copies are kept again."""
        self._written_by_graphs = False
        self.written()

    def clear(self) -> None:
        """Free the copies, but for those that graphs read; the next call makes others."""
        self._cache.clear()

    def addresses(self) -> tuple[int, ...]:
        """Where the copies lie: what a captured graph depends on."""
        return self._cache.addresses()

    def stepped(self, held: set[int]) -> None:
        """An optimizer took a step.  held: the storages of its parameters."""
        mine = {storage.cdata for source in self._sources.values() for storage in source.storages}
        if mine & held:
            self._held = True
        elif self._held or not any(source.trained for source in self._sources.values()):
            return
        self.written()

    def written(self) -> None:
        """Note a write that torch may not have counted: cast again in the next call, and now where a graph reads."""
        self._writes += 1
        sources = [
            (name, [ref() for ref in source.weights], source.cast, source.trained)
            for name, source in self._sources.items()
        ]
        if any(w is not None and capturing(w) for _, weights, _, _ in sources for w in weights):
            self._written_by_graphs = True
            return
        read = self._cache.keys_read_by_graphs()
        for name, weights, cast, trained in sources:
            alive = [w for w in weights if w is not None]
            if name in read and len(alive) == len(weights):
                self.of(name, alive, cast, trained=trained)

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightCasts":
        return WeightCasts()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCasts, ()


_watched: "weakref.WeakSet[WeightCasts]" = weakref.WeakSet()
_hooks: list[Any] = []


def _watch(casts: WeightCasts) -> None:
    """Have steps of optimizers told to `casts`: fused ones write weights without torch counting it in `_version`."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_stepped))
    _watched.add(casts)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    held = set()
    for group in optimizer.param_groups:
        for p in group["params"]:
            local = getattr(p, "_local_tensor", p)  # a DTensor's own part
            if local.layout == torch.strided:
                held.add(local.untyped_storage()._cdata)
    for casts in list(_watched):
        casts.stepped(held)


def capturing(t: Tensor) -> bool:
    """Is a CUDA graph captured on the current stream, for a tensor of a GPU?"""
    return t.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
