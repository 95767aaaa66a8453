"""Device memory that is kept between calls, and the one rule for it (docs/architecture.md, "Memory between calls").

A value made by one call is read by later ones: on other streams, which have not waited for it; in CUDA graphs under
capture, where nothing runs yet; by graphs that outlive whoever owns it.  `DeviceCache` is the only owner of such
memory in the library.  It belongs to the object whose data the value was computed from, and dies with it.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewright.hardware import graph_capture
from tilewright.hardware.device import raw_device, raw_stream

V = TypeVar("V", bound=tuple[Any, ...])
_PLAIN = frozenset((Tensor, Parameter))


class Queued:
    """Tensors of one device that a stream makes: other streams wait for it, and their memory for other streams.

    maker, stream: where they are made, and its handle; event: when they are there, None for now; readers: other streams
    that read them; captures: the numbers of those that read them, or of the one in which they are made.
    """

    __slots__ = ("captures", "event", "maker", "readers", "stream", "tensors")

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.stream = 0
        self.maker: Any = None
        self.event: Any = None
        self.readers: dict[int, torch.cuda.Stream] = {}
        self.captures: set[int | None] = set()

    def made_on(self, device: torch.device) -> None:
        """Note that the tensors are queued on the current stream."""
        self.maker = torch.cuda.current_stream(device)
        self.stream, self.event = self.maker.cuda_stream, torch.cuda.Event()
        self.event.record(self.maker)

    def read_on(self, device: torch.device) -> None:
        """Let the current stream read them, outside of a capture or in the one in which they are made."""
        stream = torch.cuda.current_stream(device)
        if stream.cuda_stream == self.stream:
            return
        if self.event is not None:
            stream.wait_event(self.event)
        if stream.cuda_stream not in self.readers:
            self.readers[stream.cuda_stream] = stream
            for t in self.tensors:
                t.record_stream(stream)

    def complete(self) -> None:
        """Wait, on the host, until they are there: replays of a graph wait for nothing that came before it."""
        if self.event is not None:
            with graph_capture.beside_captures():
                self.event.synchronize()
            self.event = None

    def overwrite(self, values: list[Tensor], device: torch.device) -> None:
        """Put other values into the same memory, after everything that was queued to read it."""
        self.read_on(device)
        stream = torch.cuda.current_stream(device)
        for other in (self.maker, *self.readers.values()):
            if other.cuda_stream != stream.cuda_stream:
                stream.wait_stream(other)
        with torch.no_grad():
            for old, new in zip(self.tensors, values, strict=True):
                old.copy_(new)
        self.made_on(device)  # readers stay those that the allocator knows of


class _Entry(Queued, Generic[V]):
    """One value, computed from data that lies at `place`, in version `state`."""

    __slots__ = ("place", "state", "value")

    def __init__(self, value: V, place: Hashable, state: Any) -> None:
        super().__init__(_tensors(value))
        self.value, self.place, self.state = value, place, state

    def holds(self, place: Hashable, state: Any) -> bool:
        """Is this the value of such data?"""
        return self.place == place and bool(self.state == state)


class DeviceCache(Generic[V]):
    """Values by key, each a tuple whose tensors lie on one device.

    `get` may be called on any stream, in a capture and from any thread.  What it returns is right for the work that the
    caller then queues on the current stream of the device, and for nothing else: ask again in the next call.
    name: what is kept, for tests that walk all caches.  Copies and pickles of a cache are empty.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._eager: dict[Hashable, _Entry[V]] = {}
        self._captured: dict[Hashable, _Entry[V]] = {}

    def get(
        self,
        key: Hashable,
        device: torch.device,
        make: Callable[[], V],
        *,
        place: Hashable = None,
        state: Any = None,
        needs: Any = None,
    ) -> V:
        """The value of `key`, which `make()` computes on the current stream of `device`.

        place, state: where the data lies that it is computed from, and in which version; a value of another is not
        returned.  Where only `state` differs and a graph reads the value, the new one takes its place in memory.
        needs: what `make` reads.  A graph that records `make` does so in every replay, and keeps it alive.
        """
        if device.type != "cuda":
            entry = self._eager.get(key)
            if entry is None or not entry.holds(place, state):
                entry = _Entry(_made(make), place, state)
                if _plain(entry.tensors):
                    self._eager[key] = entry
            return entry.value
        capture = graph_capture.current_capture(device)
        if capture is None:
            return self._eager_value(key, device, make, place, state)
        return self._captured_value(key, device, make, place, state, needs, capture)

    def _eager_value(
        self, key: Hashable, device: torch.device, make: Callable[[], V], place: Hashable, state: Any
    ) -> V:
        entry = self._eager.get(key)
        if entry is not None and entry.holds(place, state):
            if raw_stream(raw_device() if device.index is None else device.index) != entry.stream:
                entry.read_on(device)
            return entry.value
        value = _made(make)
        if entry is not None and entry.captures and entry.place == place and _alike(entry.value, value):
            entry.overwrite(_tensors(value), device)
            entry.state = state
            return entry.value
        made = _Entry(value, place, state)
        if _plain(made.tensors):
            made.made_on(device)
            self._eager[key] = made
            graph_capture.release()
        return value

    def _captured_value(
        self,
        key: Hashable,
        device: torch.device,
        make: Callable[[], V],
        place: Hashable,
        state: Any,
        needs: Any,
        capture: graph_capture.Capture,
    ) -> V:
        """A value that was there before the capture, held for the graph, or one that the graph makes for itself."""
        known = capture.number is not None
        entry = self._eager.get(key)
        if known and entry is not None and entry.holds(place, state):
            if capture.number not in entry.captures:
                entry.complete()
                graph_capture.hold(capture, entry.value)
                entry.captures.add(capture.number)
            return entry.value
        entry = self._captured.get(key)
        if known and entry is not None and capture.number in entry.captures and entry.holds(place, state):
            entry.read_on(device)
            return entry.value
        entry = _Entry(_made(make), place, state)
        if needs is not None:
            graph_capture.hold(capture, needs)
        entry.captures.add(capture.number)
        entry.made_on(device)
        self._captured[key] = entry
        return entry.value

    def find(self, key: Hashable, device: torch.device) -> V | None:
        """The value of a key without place and state, if the current stream made it and is not captured; else `get`."""
        entry = self._eager.get(key)
        if entry is None or device.type != "cuda":
            return None if entry is None else entry.value
        if raw_stream(raw_device() if device.index is None else device.index) != entry.stream:
            return None
        return None if graph_capture.current_capture(device) is not None else entry.value

    def peek(self, key: Hashable) -> V | None:
        """The value of `key` as it was last made outside of captures, of whatever data, for traced code: no order, no
        version.
        """
        entry = self._eager.get(key)
        return None if entry is None else entry.value

    def keys_read_by_graphs(self) -> list[Hashable]:
        """The keys whose values graphs read that were captured after they were made."""
        return [key for key, entry in self._eager.items() if entry.captures]

    def addresses(self) -> tuple[int, ...]:
        """Where the tensors of all values lie, but for those that belong to a graph."""
        return tuple(t.data_ptr() for entry in list(self._eager.values()) for t in entry.tensors)

    def clear(self) -> None:
        """Forget every value.  Graphs that read one keep it."""
        self._eager.clear()
        self._captured.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceCache[V]":
        return type(self)(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name,)


def _made(make: Callable[[], V]) -> V:
    """For calls of any mode: what is first needed in inference may be kept for training."""
    with torch.inference_mode(False), torch.no_grad():
        return make()


def _tensors(value: tuple[Any, ...]) -> list[Tensor]:
    return [t for t in value if isinstance(t, Tensor)]


def _plain(tensors: Iterable[Tensor]) -> bool:
    """Neither fake tensors nor those of a transform: nothing else is memory that may be kept."""
    return all(type(t) in _PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)


def _alike(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    """May `new` be copied over `old`?"""
    return all(
        (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()) if isinstance(a, Tensor) else a == b
        for a, b in zip(old, new, strict=True)
    )
