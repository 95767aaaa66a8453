"""Memory kept between calls: who may read what, on which stream and in which capture, on a machine that keeps book.

A stream is the set of operations that come before what is queued on it next.  A value may be read where its making is
among them; a graph reads at every replay, so there the host must have waited.
"""

import copy
import ctypes
import gc
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch

from tilewright.hardware import device_cache, graph_capture
from tilewright.hardware.device_cache import DeviceCache
from tilewright.hardware.graph_capture import Capture

GPU = torch.device("cuda", 0)


class Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream, self.before = handle, set()

    def wait_event(self, event: "Event") -> None:
        self.before |= event.before

    def wait_stream(self, other: "Stream") -> None:
        self.before |= other.before


class Event:
    def record(self, stream: Stream) -> None:
        self.before = set(stream.before)

    def synchronize(self) -> None:
        Machine.only.host |= self.before


class Machine:
    """current: the stream; capture: the one it takes part in, or None; host: operations the host has waited for."""

    only: "Machine"

    def __init__(self) -> None:
        self.streams = {name: Stream(handle) for handle, name in enumerate("abc")}
        self.current, self.capture, self.host = self.streams["a"], None, set()
        self.held, self.recorded, self.count = [], [], 0
        Machine.only = self

    def on(self, name: str, capture: int | None = None) -> None:
        self.current = self.streams[name]
        self.capture = None if capture is None else Capture(capture, None)

    def queue(self, what: str) -> None:
        self.current.before.add(what)

    def make(self, *numbers: float):
        """A value whose making is queued on the current stream."""

        def made() -> tuple[str, torch.Tensor]:
            self.count += 1
            self.queue(f"make {self.count}")
            return "text", torch.tensor(numbers or (float(self.count),))

        return made


@pytest.fixture
def machine(monkeypatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: made.recorded.append((t.data_ptr(), s.cuda_stream)))
    monkeypatch.setattr(device_cache, "raw_stream", lambda index: made.current.cuda_stream)
    monkeypatch.setattr(graph_capture, "current_capture", lambda device: made.capture)
    monkeypatch.setattr(graph_capture, "hold", lambda capture, needed: made.held.append((capture.number, needed)))
    monkeypatch.setattr(graph_capture, "outside_captures", nullcontext)
    return made


@pytest.fixture
def cache() -> DeviceCache:
    return DeviceCache("a test")


def test_one_stream_makes_once(machine, cache):
    assert cache.get("k", GPU, machine.make()) is cache.get("k", GPU, machine.make())
    assert machine.recorded == []


def test_another_stream_waits_and_holds_the_memory(machine, cache):
    value = cache.get("k", GPU, machine.make())
    machine.on("b")
    assert cache.get("k", GPU, machine.make()) is value
    assert "make 1" in machine.streams["b"].before
    assert machine.recorded == [(value[1].data_ptr(), 1)]
    machine.on("c")
    assert cache.get("k", GPU, machine.make()) is value
    assert "make 1" in machine.streams["c"].before


def test_what_a_capture_makes_stays_in_it(machine, cache):
    machine.on("a", capture=7)
    inside = cache.get("k", GPU, machine.make(), needs="ids")
    assert cache.get("k", GPU, machine.make(), needs="ids") is inside
    machine.on("a", capture=8)
    other = cache.get("k", GPU, machine.make(), needs="ids")
    machine.on("a")
    outside = cache.get("k", GPU, machine.make())
    assert len({id(inside), id(other), id(outside)}) == 3
    assert machine.held == [(7, "ids"), (8, "ids")]
    assert cache.addresses() == (outside[1].data_ptr(),)


def test_another_stream_of_the_same_capture_waits(machine, cache):
    machine.on("a", capture=7)
    inside = cache.get("k", GPU, machine.make())
    machine.on("b", capture=7)
    assert cache.get("k", GPU, machine.make()) is inside
    assert "make 1" in machine.streams["b"].before


def test_a_graph_reads_what_is_there_and_holds_it(machine, cache):
    value = cache.get("k", GPU, machine.make())
    for capture in (7, 7, 8):
        machine.on("b", capture=capture)
        assert cache.get("k", GPU, machine.make(), needs="ids") is value
    assert "make 1" in machine.host
    assert machine.streams["b"].before == set(), "an event from outside would break the capture"
    assert machine.held == [(7, value), (8, value)]


def test_another_version_goes_to_other_memory_where_no_graph_reads(machine, cache):
    first = cache.get("k", GPU, machine.make(), state=1)
    second = cache.get("k", GPU, machine.make(), state=2)
    assert first[1].data_ptr() != second[1].data_ptr()
    assert cache.get("k", GPU, machine.make(), state=2) is second
    assert cache.keys_read_by_graphs() == []


def test_another_version_takes_the_place_that_a_graph_reads(machine, cache):
    value = cache.get("k", GPU, machine.make(1.0), place="w", state=1)
    machine.queue("read on a")
    machine.on("c")
    cache.get("k", GPU, machine.make(), place="w", state=1)
    machine.queue("read on c")
    machine.on("a", capture=7)
    cache.get("k", GPU, machine.make(), place="w", state=1)
    assert cache.keys_read_by_graphs() == ["k"]
    machine.on("b")
    address = value[1].data_ptr()
    again = cache.get("k", GPU, machine.make(2.0), place="w", state=2)
    assert again is value
    assert again[1].data_ptr() == address
    assert again[1].item() == 2.0
    assert {"read on a", "read on c"} <= machine.streams["b"].before, "who still read has been waited for"
    machine.on("a")
    machine.streams["b"].before.add("written")
    cache.get("k", GPU, machine.make(), place="w", state=2)
    assert "make 2" in machine.streams["a"].before


def test_data_elsewhere_goes_to_other_memory_though_a_graph_reads(machine, cache):
    value = cache.get("k", GPU, machine.make(), place="w", state=1)
    machine.on("a", capture=7)
    cache.get("k", GPU, machine.make(), place="w", state=1)
    machine.on("a")
    assert cache.get("k", GPU, machine.make(), place="v", state=1)[1].data_ptr() != value[1].data_ptr()


def test_an_old_version_is_made_anew_inside_a_capture(machine, cache):
    cache.get("k", GPU, machine.make(), state=1)
    machine.on("a", capture=7)
    inside = cache.get("k", GPU, machine.make(), state=2)
    assert inside[1].item() == 2.0
    assert cache.get("k", GPU, machine.make(), state=2) is inside


def test_without_a_driver_to_ask_nothing_crosses_a_capture(machine, cache):
    value = cache.get("k", GPU, machine.make())
    machine.on("a", capture=7)
    machine.capture = Capture(None, None)
    inside = [cache.get("k", GPU, machine.make(), needs="ids") for _ in range(2)]
    assert len({id(value), *map(id, inside)}) == 3
    machine.on("a")
    assert cache.get("k", GPU, machine.make()) is value


def test_a_host_has_no_streams(cache):
    values = [cache.get("k", torch.device("cpu"), lambda: (torch.ones(2),), state=state) for state in (1, 1, 2)]
    assert values[0] is values[1]
    assert values[1] is not values[2]


def test_what_is_kept_for_inference_serves_training(cache):
    with torch.inference_mode():
        (kept,) = cache.get("k", torch.device("cpu"), lambda: (torch.ones(2),))
    assert not kept.is_inference()


def test_fake_memory_is_not_kept(cache):
    with torch._subclasses.FakeTensorMode():
        cache.get("k", torch.device("cpu"), lambda: (torch.ones(2),))
    (kept,) = cache.get("k", torch.device("cpu"), lambda: (torch.ones(2),))
    assert type(kept) is torch.Tensor


def test_copies_begin_empty(cache):
    cache.get("k", torch.device("cpu"), lambda: (torch.ones(2),))
    for made in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert made.name == "a test"
        assert made.addresses() == ()


class Driver:
    """What CUDA does with user objects: calls the destructor with its argument when the graph is destroyed."""

    def __init__(self) -> None:
        self.destructors = {}

    def cuUserObjectCreate(self, made, argument, destructor, references, flags) -> int:
        self.made = (argument, destructor.value)
        assert (references, flags) == (1, 1)
        return 0

    def cuGraphRetainUserObject(self, graph, user_object, references, flags) -> int:
        self.destructors.setdefault(graph.value, []).append(self.made)
        assert (references, flags) == (1, 1)
        return 0

    def destroy(self, graph: int) -> None:
        for argument, destructor in self.destructors.pop(graph):
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destructor)(argument)


def test_what_a_graph_needs_lives_until_it_is_destroyed(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(graph_capture, "_driver", lambda: driver)
    monkeypatch.setattr(graph_capture, "_held", [])
    tensors = [torch.ones(2) for _ in range(3)]
    gone = [weakref.ref(t) for t in tensors]
    for graph, t in zip((16, 16, 32), tensors, strict=True):
        graph_capture.hold(Capture(graph + 1, graph), t)
    del t, tensors
    gc.collect()
    assert graph_capture.release() == 3
    assert all(ref() is not None for ref in gone)
    driver.destroy(16)
    assert graph_capture.release() == 1
    assert [ref() is None for ref in gone] == [True, True, False]
    driver.destroy(32)
    assert graph_capture.release() == 0
    assert gone[2]() is None


def test_where_no_driver_tells_when_a_graph_ends_it_is_held_for_ever(monkeypatch):
    monkeypatch.setattr(graph_capture, "_held", [])
    graph_capture.hold(Capture(None, None), torch.ones(2))
    assert graph_capture.release() == 1


def test_the_drivers_functions_are_there_with_these_names():
    """In CUDA's own bindings, where they are installed: this machine may have no driver."""
    driver = pytest.importorskip("cuda.bindings.driver")
    assert driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED == graph_capture._RELAXED
    assert driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC == graph_capture._NO_DESTRUCTOR_SYNC
    assert driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE == graph_capture._MOVE_REFERENCE
