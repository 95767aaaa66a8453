"""Ops that write into their arguments: schema, replay, versions, compilation, refusals."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tilewright.dispatch import (
    Contract,
    Cost,
    RawOp,
    Sample,
    Workload,
    call_in_place,
    dispatch,
    register,
    register_impl,
    unregister_impl,
)
from tilewright.dispatch.arguments import schema_of
from tilewright.dispatch.bucket import row_bucket
from tilewright.dispatch.contract import _contracts
from tilewright.dispatch.effects import as_tuple, pure, written
from tilewright.errors import InputError
from tilewright.validate import check

OP = "test_set_"
RAN: list[str] = []


class Args(NamedTuple):
    x: Tensor  # (M, N)
    total: Tensor  # (M, N)
    count: Tensor | None  # (M,)
    factor: float


class Bucket(NamedTuple):
    M: int


def reference(total: Tensor, x: Tensor, *, count: Tensor | None = None, factor: float = 1.0) -> None:
    """Plain torch, in place too; count becomes the number of columns."""
    total.copy_(factor * x)
    if count is not None:
        count.fill_(x.shape[1])


def _raw(args: Args) -> None:
    return reference(args.total, args.x, count=args.count, factor=args.factor)


FORWARD = RawOp(
    OP,
    "fwd",
    Args,
    package="tilewright_tests_no_such_package",
    outputs=lambda args: (),
    reference=_raw,
    bucket=lambda args: Bucket(row_bucket(args.x.shape[0])),
    bucket_names=Bucket._fields,
    count=0,
    mutates=("total", "count"),
)


@dispatch(OP)
def set_(
    total: Tensor, x: Tensor, *, count: Tensor | None = None, factor: float = 1.0, backend: str | None = None
) -> None:
    call_in_place(CONTRACT, Args(x, total, count, factor), backend)


def inputs(params, dtype, device, seed):
    generator = torch.Generator().manual_seed(seed)
    total, x = (torch.randn(params["M"], 5, generator=generator).to(device, dtype) for _ in range(2))
    return Sample((total, x), {"count": torch.zeros(params["M"], device=device)} if params.get("count") else {})


CONTRACT = register(
    Contract(
        name=OP, family="tests", summary="an assignment", reference=reference, forward=FORWARD,
        check=lambda args: None, inputs=inputs, cost=lambda sample, direction: Cost(1, 1, 1),
        workloads=(), cpu_workloads=(),
        edge_cases=(Workload("plain", {"M": 4}), Workload("counted", {"M": 3, "count": True})),
        bad_inputs=(), batch_dim=None,
    )
)  # fmt: skip
del _contracts[OP]  # tests that go through all contracts are collected after this module


@pytest.fixture(autouse=True)
def kernel():
    """A backend that can be made to do wrong."""
    behaviour = SimpleNamespace(wrong=None)

    @register_impl(OP, backend="cpu")
    def launch(outs, x, total, count, factor, *, config):
        assert outs == ()
        RAN.append("kernel")
        total.copy_(factor * x)
        if count is not None and behaviour.wrong != "count":
            count.fill_(x.shape[1])
        if behaviour.wrong == "input":
            x.zero_()
        if behaviour.wrong == "total":
            total[-1, -1] = 7

    yield behaviour
    unregister_impl(OP, backend="cpu")
    FORWARD.forget_plans()


@pytest.fixture(scope="module", autouse=True)
def _only_here():
    _contracts[OP] = CONTRACT
    yield
    del _contracts[OP]


def test_the_schema_says_what_is_written():
    assert schema_of(Args, ("total", "count")) == "Tensor x, Tensor(m0!) total, Tensor(m1!)? count, float factor"
    assert str(FORWARD.torch_op._schema).endswith("-> ()")


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_first_call_and_its_replays_write(backend):
    for i in range(3):
        total, count, x = torch.zeros(2, 5), torch.zeros(2), torch.full((2, 5), float(i))
        version = total._version
        assert set_(total, x, count=count, factor=2.0, backend=backend) is None
        assert torch.equal(total, 2 * x)
        assert count.tolist() == [5, 5]
        assert total._version > version


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_every_mode_of_check_passes(backend):
    made = check(OP, backend=backend, device="cpu", dtype=torch.float32, compiler="aot_eager")
    assert made.passed, str(made)
    passed = {r.mode for r in made.results if r.status == "passed"}
    assert passed >= {"eager", "opcheck", "compile_static", "inputs_unchanged", "determinism", "changed_inputs"}


@pytest.mark.parametrize(
    ("wrong", "modes"), [("total", "eager"), ("count", "eager"), ("input", "inputs_unchanged"), ("total", "poison")]
)
def test_a_kernel_that_writes_otherwise_is_found(kernel, wrong, modes):
    kernel.wrong = wrong
    assert not check(OP, backend="cpu", device="cpu", dtype=torch.float32, modes=modes).passed


def test_what_was_written_follows_the_results():
    total, x, count = torch.zeros(2, 5), torch.ones(2, 5), torch.zeros(2)
    assert [t is w for t, w in zip(written(CONTRACT, (total, x), {"count": count}), (total, count), strict=True)]
    outputs = pure(CONTRACT, set_)(total, x, count=count)
    assert [o.shape for o in outputs] == [(2, 5), (2,)]
    assert outputs[0].all()
    assert not total.any()  # the call had copies
    assert as_tuple(None) == ()


def test_gradients_tangents_and_shared_memory_are_refused():
    x, total = torch.ones(2, 5), torch.zeros(2, 5)
    with pytest.raises(InputError, match=r"test_set_ writes into its arguments and has no gradient, and x requires"):
        set_(total, x.clone().requires_grad_())
    with pytest.raises(InputError, match=r"total is expanded, strides \(0, 1\)"):
        set_(torch.zeros(1, 5).expand(2, 5), x)
    with pytest.raises(InputError, match="total has the negative bit"):
        set_(torch.zeros(2, 5, dtype=torch.complex64).conj().imag, x)
    assert not total.any()


def test_a_graph_writes_and_later_readers_see_it():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(total, x):
        before = total.sum()
        set_(total, x, factor=3.0, backend="cpu")
        return before, total.sum()

    total = torch.ones(2, 5)
    before, after = step(total, torch.ones(2, 5))
    assert (before, after) == (10, 30)
    assert torch.equal(total, torch.full((2, 5), 3.0))


def test_under_the_setting_no_call_escapes_its_checks(monkeypatch):
    """TILEWRIGHT_CHECK=1: nothing is kept that would make the next call without them."""
    from tilewright import settings

    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    settings.reload()
    try:
        set_(torch.zeros(2, 5), torch.ones(2, 5), backend="cpu")
        assert not FORWARD.entries
    finally:
        monkeypatch.delenv("TILEWRIGHT_CHECK")
        settings.reload()
    set_(torch.zeros(2, 5), torch.ones(2, 5), backend="cpu")
    assert FORWARD.entries
