"""Device memory that is kept between calls, and the rule for it (docs/architecture.md, "Memory between calls").

Later calls read a value that one call computed: on other streams, which have not waited for it; in CUDA graphs under
capture, where nothing runs yet; in replays of graphs that outlive the owner of the value.  `DeviceCache` is the only
owner of such memory in the library.  It belongs to the object whose data the value was computed from, and dies with it.
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
    """Tensors of one device that one stream computes and other streams may read.

    maker, stream: the stream that computes them, and its handle.  event: recorded after them, None once complete.
    readers: other streams that read them.  captures: numbers of the captures that read them, or of the one that
    computes them.
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
        """Record that the current stream computes the tensors."""
        self.maker = torch.cuda.current_stream(device)
        self.stream, self.event = self.maker.cuda_stream, torch.cuda.Event()
        self.event.record(self.maker)

    def read_on(self, device: torch.device) -> None:
        """Let the current stream read them, outside of captures or in the capture that computes them."""
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
        """Wait on the host until they are computed: a graph's replay does not wait for earlier work."""
        if self.event is not None:
            with graph_capture.outside_captures():
                self.event.synchronize()
            self.event = None

    def overwrite(self, values: list[Tensor], device: torch.device) -> None:
        """Copy new values into the same memory, after all queued readers."""
        self.read_on(device)
        stream = torch.cuda.current_stream(device)
        for other in (self.maker, *self.readers.values()):
            if other.cuda_stream != stream.cuda_stream:
                stream.wait_stream(other)
        with torch.no_grad():
            for old, new in zip(self.tensors, values, strict=True):
                old.copy_(new)
        self.made_on(device)  # readers stay: the allocator has recorded them


class _Entry(Queued, Generic[V]):
    """One value, computed from version `state` of the data at `place`."""

    __slots__ = ("place", "state", "value")

    def __init__(self, value: V, place: Hashable, state: Any) -> None:
        super().__init__(_tensors(value))
        self.value, self.place, self.state = value, place, state

    def holds(self, place: Hashable, state: Any) -> bool:
        """Was the value computed from this version of this data?"""
        return self.place == place and bool(self.state == state)


class DeviceCache(Generic[V]):
    """Values by key, each a tuple whose tensors are on one device.

    `get` may be called on any stream, in a capture and from any thread.  Its result is valid only for work that the
    caller then queues on the current stream of the device: call `get` again in the next call.
    name: describes the values, for tests of all caches.  Copies and pickles of a cache are empty.
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

        place, state: the address and the version of the data that it is computed from; a value of other data is not
        returned.  If only `state` differs and a graph reads the value, the new one overwrites it in memory.
        needs: what `make` reads.  A graph that captures `make` runs it in every replay, and keeps `needs` alive.
        """
        if device.type != "cuda":
            entry = self._eager.get(key)
            if entry is None or not entry.holds(place, state):
                entry = _Entry(_evaluate(make), place, state)
                if _is_memory(entry.tensors):
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
        value = _evaluate(make)
        if entry is not None and entry.captures and entry.place == place and _alike(entry.value, value):
            entry.overwrite(_tensors(value), device)
            entry.state = state
            return entry.value
        entry = _Entry(value, place, state)
        if _is_memory(entry.tensors):
            entry.made_on(device)
            self._eager[key] = entry
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
        """A value from before the capture, which the graph keeps alive, or one that the graph computes."""
        has_number = capture.number is not None
        entry = self._eager.get(key)
        if has_number and entry is not None and entry.holds(place, state):
            if capture.number not in entry.captures:
                entry.complete()
                graph_capture.hold(capture, entry.value)
                entry.captures.add(capture.number)
            return entry.value
        entry = self._captured.get(key)
        if has_number and entry is not None and capture.number in entry.captures and entry.holds(place, state):
            entry.read_on(device)
            return entry.value
        entry = _Entry(_evaluate(make), place, state)
        if needs is not None:
            graph_capture.hold(capture, needs)
        entry.captures.add(capture.number)
        entry.made_on(device)
        self._captured[key] = entry
        return entry.value

    def find(self, key: Hashable, device: torch.device) -> V | None:
        """The value of a key without place and state, if the current stream made it and is not capturing; else None."""
        entry = self._eager.get(key)
        if entry is None or device.type != "cuda":
            return None if entry is None else entry.value
        if raw_stream(raw_device() if device.index is None else device.index) != entry.stream:
            return None
        return None if graph_capture.current_capture(device) is not None else entry.value

    def peek(self, key: Hashable) -> V | None:
        """The last value of `key` from outside of captures, with no synchronisation or version check, for tracing."""
        entry = self._eager.get(key)
        return None if entry is None else entry.value

    def keys_read_by_graphs(self) -> list[Hashable]:
        """The keys of values that were computed before a capture and are read by its graph."""
        return [key for key, entry in self._eager.items() if entry.captures]

    def addresses(self) -> tuple[int, ...]:
        """The addresses of the tensors of all values but those that a graph computes."""
        return tuple(t.data_ptr() for entry in list(self._eager.values()) for t in entry.tensors)

    def clear(self) -> None:
        """Forget every value.  Graphs that read one keep it."""
        self._eager.clear()
        self._captured.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceCache[V]":
        return type(self)(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name,)


def _evaluate(make: Callable[[], V]) -> V:
    """Call `make` outside of inference mode: a value first computed in inference may serve training later."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return make()
    with torch.no_grad():
        return make()


def _tensors(value: tuple[Any, ...]) -> list[Tensor]:
    return [t for t in value if isinstance(t, Tensor)]


def _is_memory(tensors: Iterable[Tensor]) -> bool:
    """Are these ordinary tensors, neither fake ones nor those of a transform?  Only these may be kept."""
    return all(type(t) in _PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)


def _alike(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    """Can `new` be copied over `old`?"""
    return all(
        (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()) if isinstance(a, Tensor) else a == b
        for a, b in zip(old, new, strict=True)
    )
