"""Float8 copies of weights, cached between calls and cast again when the weights change."""

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
    """The weights of a copy, and their cast.  trained: an optimizer writes the weights, perhaps through a master."""

    weights: tuple["weakref.ref[Tensor]", ...]
    storages: tuple[StorageWeakRef, ...]
    cast: Callable[..., Cast]
    trained: bool


class WeightCasts:
    """Float8 copies by name.  A copy is valid until torch counts a write to one of its weights, a weight moves to other
    memory, or an optimizer that holds a weight takes a step.

    A trained weight that no optimizer holds is written through a master copy elsewhere: there any step counts.  Writes
    that torch does not count, through `weight.data` or by the replay of a CUDA graph, need `requantise()` after them.
    A copy that a CUDA graph reads is cast again in the same memory, and immediately after a step, a loaded state_dict
    or `requantise()`, because a replay cannot check.  Once a graph under capture trains the weights, every call casts
    again: the replays write without being counted.

    Copying or pickling the module does not copy the casts; the new module casts again.
    """

    def __init__(self) -> None:
        self._cache: DeviceCache[Cast] = DeviceCache("float8 weights")
        self._sources: dict[str, _Source] = {}
        self._writes = 0  # writes that torch does not count
        self._written_by_graphs = self._held = False

    def of(self, name: str, weights: Sequence[Tensor], cast: Callable[..., Cast], *, trained: bool = False) -> Cast:
        """The cached result of `cast(*weights)`, or a new one.  trained: the weights require gradients."""
        memory = [w.untyped_storage() for w in weights]
        storages = tuple([StorageWeakRef(storage) for storage in memory])
        if self._written_by_graphs:
            self._writes += 1

        def make() -> Cast:
            self._sources[name] = _Source(tuple([weakref.ref(w) for w in weights]), storages, cast, trained)
            _watch(self)
            return cast(*[w.detach() for w in weights])

        place = (storages, *[(w.storage_offset(), w.shape, w.dtype) for w in weights])
        state = (self._writes, *[-1 if w.is_inference() else w._version for w in weights])
        return self._cache.get(name, weights[0].device, make, place=place, state=state, needs=memory)

    def last(self, name: str) -> Cast | None:
        """The latest result of `of` for any weights: for traced code, which cannot read versions."""
        return self._cache.peek(name)

    def trained_by_graph(self) -> None:
        """Note that a graph under capture trains the weights."""
        self._written_by_graphs = True

    def requantise(self) -> None:
        """`written`, and cache copies again: no graph trains the weights any more."""
        self._written_by_graphs = False
        self.written()

    def clear(self) -> None:
        """Free the copies that no graph reads; the next call casts again."""
        self._cache.clear()

    def addresses(self) -> tuple[int, ...]:
        """Addresses of the copies: a captured graph depends on them."""
        return self._cache.addresses()

    def stepped(self, held: set[int]) -> None:
        """Note a step of an optimizer.  held: the storages of its parameters."""
        storages = {storage.cdata for source in self._sources.values() for storage in source.storages}
        if storages & held:
            self._held = True
        elif self._held or not any(source.trained for source in self._sources.values()):
            return
        self.written()

    def written(self) -> None:
        """Note a write that torch may not have counted: cast again in the next call; now, if a graph reads the copy."""
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
    """Call `casts.stepped` after steps of optimizers: fused ones write weights without a change of `_version`."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_stepped))
    _watched.add(casts)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    held = set()
    for group in optimizer.param_groups:
        for p in group["params"]:
            local = getattr(p, "_local_tensor", p)  # the local shard of a DTensor
            if local.layout == torch.strided:
                held.add(local.untyped_storage()._cdata)
    for casts in list(_watched):
        casts.stepped(held)


def capturing(t: Tensor) -> bool:
    """True if t is on a GPU and the current stream captures a CUDA graph."""
    return t.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
