"""The rows of `mla` in the suite "attention": they can be made, are counted with both products, and have peers."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.bench.cases import select
from tilewright.bench.peers import declared_peers
from tilewright.dispatch import contract
from tilewright.ops.attention.mla.workloads import COMPILED, WORKLOADS
from tilewright.ops.attention.peers.mla import PEERS

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MLA = contract("mla")


def test_every_declared_row_can_be_made() -> None:
    cases = select("attention", ops=["mla"], device=GPU)
    assert {case.direction for case in cases} == {"fwd", "bwd"}
    with FakeTensorMode():
        for workload in {case.workload.name: case.workload for case in cases}.values():
            q, q_pe, k, k_pe, v = MLA.inputs(workload.params, torch.bfloat16, CPU, 0).args
            assert q.shape == k.shape == v.shape
            assert (q.shape[3], q_pe.shape[3]) == (128, 64)
            assert k_pe.shape == (k.shape[0], 1, k.shape[2], 64)


def test_the_rows_that_the_targets_speak_of() -> None:
    assert {w.params["H"] for w in WORKLOADS} == {16, 128}
    assert {w.params["S"] for w in WORKLOADS} == {1024 << i for i in range(5)}
    assert {w.params["B"] for w in WORKLOADS} == {1, 2, 4, 8}
    assert {w.name for w in WORKLOADS} >= COMPILED


def test_the_cost_is_that_of_wide_keys_and_narrow_values() -> None:
    params = {"B": 1, "H": 2, "S": 64, "D": 128, "D_pe": 64, "D_v": 128}
    sample = MLA.inputs(params, torch.bfloat16, CPU, 0)
    there, back = (MLA.cost(sample, direction) for direction in ("fwd", "bwd"))
    pairs = 2 * 64 * 65 // 2
    assert there.flops == 2 * pairs * (192 + 128)
    assert back.flops == 2 * pairs * (3 * 192 + 2 * 128)
    read = 2 * (2 * 64 * (128 + 64 + 128 + 128) + 64 * 64)  # five tensors, k_pe once
    assert there.bytes_read == read
    assert back.bytes_written == read
    full = MLA.inputs({**params, "causal": False}, torch.bfloat16, CPU, 0)
    assert MLA.cost(full, "fwd").flops == 2 * 2 * 64 * 64 * (192 + 128)


def test_who_competes() -> None:
    names = {"cudnn", "cudnn_joined", "flash", "flash_joined", "flex"}
    assert {peer.name for peer in declared_peers(MLA, GPU)} == names
    assert {peer.name for peer in declared_peers(MLA, CPU)} == {"eager", "compile"}


def test_joining_beforehand_is_no_way_to_gradients_of_the_parts() -> None:
    sample = MLA.inputs(MLA.cpu_workloads[0].params, torch.bfloat16, CPU, 0)
    assert all(peer.make(sample) is not None for peer in PEERS)
    sample.args[0].requires_grad_()
    made = {peer.name for peer in PEERS if peer.make(sample) is not None}
    assert made == {"cudnn", "flash", "flex"}
