"""Tensor maps: what the driver is told of a tensor, what is refused before, and that equal requests share one."""

from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch

from tilewright.errors import InputError
from tilewright.jit import tensor_map as module
from tilewright.jit.collect import collect
from tilewright.jit.tensor_map import tensor_map

pytest.importorskip("cuda.core")
GPU = torch.device("cuda", 0)
ADDRESS = 0x7F0000000000


class View:
    """In the place of cuda-core's view: notes what a map would be made of."""

    asked: ClassVar[list[tuple]] = []

    def __init__(self, memory):
        self.memory = memory

    @classmethod
    def from_cuda_array_interface(cls, memory, stream_ptr):
        assert stream_ptr == -1
        return cls(memory)

    def as_tensor_map(self, box, **options):
        if box == (13, 16):
            raise ValueError("the driver does not like 13")
        View.asked.append((self.memory.__cuda_array_interface__, box, options))
        return object()


@pytest.fixture
def asked(monkeypatch):
    """What cuda-core was asked for: (array interface, box, options) of each map."""
    from cuda.core import utils

    monkeypatch.setattr(utils, "StridedMemoryView", View)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(View, "asked", [])
    module._make.cache_clear()
    yield View.asked
    module._make.cache_clear()


def make(shape=(128, 64), strides=None, dtype=torch.bfloat16, box=(64, 64), **changed):
    strides = strides or torch.empty(shape, device="meta").stride()
    options = {"pointer": ADDRESS, "device": GPU, "swizzle": 0} | changed
    return module._make(options["pointer"], shape, strides, dtype, options["device"], box, options["swizzle"])


def test_a_matrix_with_padded_rows(asked):
    make((100, 60), (64, 1), box=(32, 64), swizzle=128)
    ((interface, box, options),) = asked
    assert interface == {
        "version": 3,
        "data": (ADDRESS, False),
        "shape": (100, 60),
        "strides": (128, 2),
        "typestr": "<u2",
        "stream": None,
    }
    assert box == (32, 64)
    assert {name: value.name for name, value in options.items()} == {
        "data_type": "BFLOAT16",
        "swizzle": "SWIZZLE_128B",
        "l2_promotion": "L2_256B",
    }


@pytest.mark.parametrize(
    ("dtype", "typestr", "name"),
    [
        (torch.float8_e4m3fn, "|u1", "UINT8"),
        (torch.uint8, "|u1", "UINT8"),
        (torch.float16, "<u2", "FLOAT16"),
        (torch.float32, "<u4", "FLOAT32"),
        (torch.int32, "<u4", "INT32"),
        (torch.float64, "<u8", "FLOAT64"),
    ],
    ids=str,
)
def test_types(asked, dtype, typestr, name):
    make(dtype=dtype, box=(8, 16))
    ((interface, _, options),) = asked
    assert (interface["typestr"], options["data_type"].name) == (typestr, name)


@pytest.mark.parametrize(
    ("shape", "strides", "pitches"),
    [
        ((64,), (1,), (2,)),
        ((3, 8, 16), (128, 16, 1), (256, 32, 2)),
        ((3, 8, 16), (16, 48, 1), (32, 96, 2)),  # transposed outer dimensions
        ((2, 3, 4, 5, 16), (960, 320, 80, 16, 1), (1920, 640, 160, 32, 2)),
        ((1, 60), (3, 1), (128, 2)),  # the stride of a single row means nothing
        ((4, 1, 64), (64, 7, 1), (128, 128, 2)),
        ((4, 1), (8, 5), (16, 2)),  # nor does that of a single column
    ],
)
def test_strides_are_told_in_bytes(asked, shape, strides, pitches):
    make(shape, strides, box=(8,) * len(shape))
    assert asked[0][0]["strides"] == pitches


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pointer": ADDRESS + 8}, "begins at address 0x7f0000000008; it must be a multiple of 16"),
        ({"strides": (60, 1), "shape": (100, 60)}, "a stride of 60 elements is 120 bytes; it must be a multiple of 16"),
        ({"strides": (1, 128)}, "the last dimension has stride 128; it must be contiguous"),
        ({"shape": (2,) * 6, "box": (2,) * 6}, "has 6 dimensions; the TMA takes 1 to 5"),
        ({"shape": (), "box": ()}, "has 0 dimensions"),
        ({"shape": (0, 64)}, "every dimension must have 1 to"),
        ({"dtype": torch.complex64}, "the TMA has no such type; allowed: uint8"),
        ({"device": torch.device("cpu")}, "is on cpu"),
        ({"box": (64,)}, "needs 2 sizes from 1 to 256"),
        ({"box": (257, 64)}, "needs 2 sizes from 1 to 256"),
        ({"box": (0, 64)}, "needs 2 sizes from 1 to 256"),
        ({"box": (64, 12)}, "the rows of box .* are 24 bytes; they must be a multiple of 16"),
        ({"box": (64, 128), "swizzle": 128}, "256 bytes, wider than the swizzle of 128; .* at most 64"),
        ({"box": (64, 32), "swizzle": 32}, "64 bytes, wider than the swizzle of 32; .* at most 16"),
        ({"swizzle": 256}, "swizzle 256 is one of"),
        ({"box": (13, 16)}, r"box \(13, 16\), swizzle 0: the driver does not like 13"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_is_refused(asked, changed, said):
    with pytest.raises(InputError, match=said):
        make(**changed)
    assert asked == []


def test_equal_requests_share_a_map(asked):
    assert make() is make()
    assert make() is not make(pointer=ADDRESS + 256)
    assert make() is not make(swizzle=128)
    assert make() is not make(device=torch.device("cuda", 1))
    assert len(asked) == 4


def test_a_map_knows_its_device(asked):
    assert make(device=torch.device("cuda", 3)).device == 3


def test_the_cache_is_bounded():
    assert module._make.cache_info().maxsize == 4096


def test_a_map_does_not_keep_the_tensor(asked):
    make()
    interface = asked[0][0]
    assert not any(isinstance(value, torch.Tensor) for value in interface.values())


def test_a_tensor_is_described_by_its_own_metadata(monkeypatch):
    x = torch.zeros(10, 64, dtype=torch.bfloat16)[2:, :32]
    monkeypatch.setattr(module, "_make", lambda *args: args)
    found = tensor_map(x, (8, 32), swizzle=64)
    assert found == (x.data_ptr(), (8, 32), (64, 1), torch.bfloat16, torch.device("cpu"), (8, 32), 64)


def test_while_collecting_there_is_no_memory():
    with collect("sm_90a"):
        assert tensor_map(torch.empty(8, 64, device="meta"), (8, 64)) is None


def test_all_tapes_together_keep_a_bounded_number_of_maps(asked, monkeypatch):
    """Each tape moves its maps to the addresses of later calls; what it finds there is shared by the process."""
    monkeypatch.setattr(module, "_moved", {})
    monkeypatch.setattr(module, "_CACHED", 100)
    for _ in range(60):
        moved = make().moved()
        descriptors = [moved(ADDRESS + 256 * i) for i in range(5)]
        assert [moved(ADDRESS + 256 * i) for i in range(5)] == descriptors  # the same objects
        assert len(module._moved) <= 100
    assert len(module._moved) == 100


def test_maps_of_other_forms_at_one_address_are_others(asked, monkeypatch):
    monkeypatch.setattr(module, "_moved", {})
    first, second = make().moved(), make(box=(32, 64)).moved()
    assert first(ADDRESS) is not second(ADDRESS)
