"""A tape must repeat a call for other tensors, and must refuse whenever a pointer's origin is in doubt."""

import pytest
import torch

from tilewright.jit import tape as module
from tilewright.jit import tensor_map
from tilewright.jit.tape import Step, Taping
from tilewright.jit.tensor_map import TensorMap

A, B = torch.zeros(8), torch.zeros(8)


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(module, "_current_stream", lambda device: 1000 + device)


def recorded(params, bases):
    launches = []
    taping = Taping()
    taping.add(Step(lambda *args: launches.append(args), (4, 1, 1), "function", ("head",), params))
    return taping.finish(bases), launches


def test_replay_puts_new_pointers_where_the_old_ones_were():
    tape, launches = recorded((A, 5, B, 0.5), (A, B))
    tape.replay(0, [111, 222])
    assert launches == [(4, 1, 1, 1000, "function", "head", 111, 5, 222, 0.5)]


def test_an_offset_into_a_base_is_kept():
    tape, launches = recorded((A[2:], B), (A, B))
    tape.replay(0, [1000, 2000])
    assert launches[0][-2:] == (1008, 2000)


def test_a_tensor_map_is_made_once_for_each_address(monkeypatch):
    made = []
    monkeypatch.setattr(tensor_map, "_make", lambda pointer, form: made.append(pointer) or TensorMap(form, 0, 0, ()))
    tape, launches = recorded((TensorMap("of A", 0, A[2:].data_ptr(), ("moved",)), B), (A, B))
    for pointer in (1000, 5000, 1000):
        tape.replay(0, [pointer, 2000])
    assert made == [1008, 5008]
    assert launches[0][-2:] == ("moved", 2000)


def test_a_tensor_map_of_unknown_memory_leaves_no_tape():
    assert recorded((TensorMap("map", 0, torch.zeros(8).data_ptr(), ()), B), (A, B))[0] is None


def test_two_inputs_at_one_address_leave_no_tape():
    assert recorded((A, B), (A, A, B))[0] is None


def test_scratch_memory_leaves_no_tape():
    assert recorded((A, torch.zeros(8)), (A, B))[0] is None


def test_a_slice_of_storage_shared_by_two_inputs_leaves_no_tape():
    packed = torch.zeros(16)
    gate, up = packed[:8], packed[8:]
    assert recorded((gate, up), (gate, up))[0] is not None, "each is exactly one input"
    assert recorded((packed[4:], B), (gate, up, B))[0] is None, "inside both storages"


def test_a_spoiled_or_empty_tape_is_none():
    taping = Taping()
    assert taping.finish((A,)) is None
    taping.add(Step(print, (1, 1, 1), None, (), (A,)))
    taping.invalidate()
    assert taping.finish((A,)) is None


def test_scratch_from_the_library_is_allocated_anew_at_each_replay():
    launches = []
    with module.listen() as taping:
        work = module.scratch((2, 3), torch.float32, torch.device("cpu"))
        taping.add(Step(lambda *args: launches.append(args), (1, 1, 1), "function", (), (A, work[1])))
    tape = taping.finish((A,))
    tape.replay(0, [111])
    tape.replay(0, [111])
    assert all(call[5] == 111 and call[6] % 4 == 0 for call in launches)
    assert launches[0][6] != work[1].data_ptr()


@pytest.mark.parametrize(
    ("work", "taped"),
    [
        (lambda: A.view(2, 4)[1:], True),
        (lambda: torch.empty_like(A), True),
        (lambda: torch.promote_types(torch.float16, torch.float32), True),
        (lambda: torch.empty(3).zero_(), False),
        (lambda: A.clone(), False),
        (lambda: A + B, False),
    ],
)
def test_a_call_in_which_torch_computes_leaves_no_tape(work, taped):
    with module.listen() as taping:
        work()
        taping.add(Step(print, (1, 1, 1), None, (), (A,)))
    assert (taping.finish((A,)) is not None) == taped
