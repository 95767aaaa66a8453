"""The suite "attention": every declared row can be made, is counted as its mask says, and has competitors."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from tilewright.bench.cases import select
from tilewright.bench.contestants import choice, random_cotangents, reference_outputs
from tilewright.bench.peers import declared_peers
from tilewright.dispatch import contract
from tilewright.ops.attention.arguments import merged
from tilewright.ops.attention.fmha.cost import pairs
from tilewright.ops.attention.fmha.samples import MASKS
from tilewright.ops.attention.fmha.variants import VARIANTS
from tilewright.ops.attention.fmha.workloads import ANCHORS, COMPILED, DENSE, MASKED, SPARSE, UNFUSED, WORKLOADS
from tilewright.ops.attention.peers.fmha import DenseMask

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FMHA = contract("fmha")


def test_every_declared_row_can_be_made() -> None:
    cases = select("attention", ops=["fmha"], device=GPU)
    assert {case.direction for case in cases} == {"fwd", "bwd"}
    with FakeTensorMode():
        for workload in {case.workload.name: case.workload for case in cases}.values():
            sample = FMHA.inputs(workload.params, torch.bfloat16, CPU, 0)
            assert sample.args[0].shape[2] == workload.params["S"]


def test_the_rows_that_the_targets_speak_of() -> None:
    names = {w.name for w in WORKLOADS}
    both = {w.name for w in WORKLOADS if w.directions == ("fwd", "bwd")}
    assert {w.name for w in (*ANCHORS, *SPARSE, *MASKED)} <= names
    assert len(names) == len(WORKLOADS)
    assert {w.name for w in ANCHORS} <= both
    assert names >= COMPILED >= DENSE
    assert names >= UNFUSED
    lengths = {w.params["S"] for w in WORKLOADS}
    assert lengths == {512 << i for i in range(8)}
    assert {w.params["D"] for w in WORKLOADS} == {64, 128, 256}


def test_a_budget_measures_anchors_and_masks_before_the_grids() -> None:
    first = (*ANCHORS, *SPARSE, *MASKED)
    assert WORKLOADS[: len(first)] == first


def test_masks_are_compared_over_one_shape() -> None:
    kinds = ("B", "H", "H_kv", "S", "D")
    causal = next(w for w in WORKLOADS if w.name == "1x32/8x16384x128_causal")
    assert {tuple(w.params[size] for size in kinds) for w in (*MASKED, causal)} == {(1, 32, 8, 16384, 128)}
    assert {w.name for w in MASKED} | {causal.name} == DENSE


@pytest.mark.parametrize("params", [
    *({"variant": name} for name in VARIANTS), {"causal": True}, {"documents": 4}, {"causal": True, "alibi": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("repeats", [True, False])
def test_a_dense_mask_is_the_same_attention(params: dict, *, repeats: bool) -> None:
    sizes = {"B": 2, "H": 4, "H_kv": 2, "S": 300, "D": 16}
    sample = FMHA.inputs({**sizes, **params}, torch.float32, CPU, 0)
    call = DenseMask("dense", SDPBackend.MATH, repeats).make(sample)
    assert call is not None
    torch.testing.assert_close(call(), FMHA.reference(*sample.args, **sample.kwargs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("params", [{}, {"causal": True, "softcap": 5.0}, {"window": 9, "sinks": True}], ids=str)
def test_what_is_no_dense_mask_is_not_offered(params: dict) -> None:
    sample = FMHA.inputs({"B": 1, "H": 2, "S": 30, "D": 16, **params}, torch.float32, CPU, 0)
    assert DenseMask("dense", SDPBackend.MATH).make(sample) is None


@pytest.mark.parametrize("params", [{}, {"causal": True}, {"window": 9}, {"sides": (5, 11)}, {"documents": 4}, *(
    {"mask": name} for name in MASKS
), *({"variant": name} for name in VARIANTS)], ids=str)  # fmt: skip
@pytest.mark.parametrize(("s_q", "s_k"), [(50, 50), (20, 50), (50, 20)])
def test_pairs_are_counted(s_q: int, s_k: int, params: dict) -> None:
    sizes = {"B": 2, "H": 4, "H_kv": 2, "S_q": s_q, "S_k": s_k, "D": 8}
    sample = FMHA.inputs({**sizes, **params}, torch.float32, CPU, 0)
    q, k, _ = sample.args
    mask = sample.kwargs.get("mask")
    seen = torch.ones(2, 4, s_q, s_k, dtype=torch.bool) if mask is None else mask.dense(2, 4, s_q, s_k)
    if params.get("causal"):
        seen = seen.tril(s_k - s_q)
    assert pairs(q, k, merged("fmha", mask, bool(params.get("causal")))) == int(seen.sum())


def test_a_backward_costs_two_and_a_half_forwards() -> None:
    sample = FMHA.inputs({"B": 1, "H": 2, "S": 64, "D": 32, "causal": True}, torch.bfloat16, CPU, 0)
    there, back = (FMHA.cost(sample, direction) for direction in ("fwd", "bwd"))
    assert 2 * back.flops == 5 * there.flops
    assert there.flops == 4 * 32 * 2 * 64 * 65 // 2


def test_efficient_competes_in_float32_without_grouped_heads() -> None:
    (peer,) = (peer for peer in declared_peers(FMHA, GPU) if peer.name == "efficient")

    def competes(dtype: torch.dtype, **params: Any) -> bool:
        return peer.make(FMHA.inputs({"B": 1, "H": 2, "S": 30, "D": 16, **params}, dtype, CPU, 0)) is not None

    assert competes(torch.float32)
    assert competes(torch.float32, causal=True)
    assert not competes(torch.bfloat16)
    assert not competes(torch.float32, H_kv=1)
    assert not competes(torch.float32, window=9)


def test_who_competes() -> None:
    assert {peer.name for peer in declared_peers(FMHA, GPU)} == {
        "cudnn", "flash", "efficient", "math", "dense_mask", "dense_mask_cudnn", "flex", "fa4",
    }  # fmt: skip
    assert {peer.name for peer in declared_peers(FMHA, CPU)} == {"eager", "compile"}


def test_a_backward_can_be_planned_without_the_lse() -> None:
    """The public function keeps lse to itself; the backward is fed from the raw op."""
    case = next(c for c in select("attention", ops=["fmha"], device=CPU) if c.direction == "bwd")
    sample = FMHA.inputs(case.workload.params, torch.bfloat16, CPU, 0)
    cotangents = random_cotangents(reference_outputs(FMHA, sample, "fwd", ()), 0)
    found = choice(case, sample, cotangents)
    assert found.raw.direction == "bwd"
    assert found.chosen == "torch"


@pytest.mark.parametrize("name", ["fmha_varlen", "mla"])
def test_a_backward_is_planned_by_the_shapes_of_the_raw_op(name) -> None:
    """The public function's results may have fewer dimensions than the raw op's."""
    case = next(c for c in select("attention", ops=[name], device=CPU) if c.direction == "bwd")
    subject = contract(name)
    sample = subject.inputs(case.workload.params, torch.bfloat16, CPU, 0)
    found = choice(case, sample, random_cotangents(reference_outputs(subject, sample, "fwd", ()), 0))
    do, q = found.raw_args[0], next(a for a in found.raw_args[1:] if isinstance(a, torch.Tensor) and a.dim() > 2)
    assert do.dim() == q.dim()
