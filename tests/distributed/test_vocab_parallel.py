"""Losses of a divided vocabulary against those of one process, on gloo: one rank, and two.

The limit of an error is three times that of the op in one process, both against float64, and four units in the last
place of the largest number.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.distributed.ranks import group, on_two_ranks
from torch import Tensor
from torch.autograd import forward_ad

from tilewright import ops
from tilewright.distributed import (
    VocabParallelLinearCrossEntropyLoss,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
    vocab_rows,
)
from tilewright.errors import InputError
from tilewright.nn import LinearCrossEntropyLoss
from tilewright.ops.loss.linear import chunks

M, V, H = 11, 31, 12  # slices of 16 and 15 classes
WEIGHTS = 0.1 + torch.arange(V) / V
ALL = {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 3.0, "class_weight": WEIGHTS, "ignore_index": 3}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum", "z_loss": 0.1},
    "none": {"reduction": "none", "chunk_rows": 4},
    "smoothed": {"label_smoothing": 0.2, "chunk_rows": 4},
    "all_mean": {**ALL, "chunk_rows": 5},
    "all_none": {**ALL, "reduction": "none"},
}


def problem(dtype: torch.dtype, ignore_index: int = -100, classes: int = V) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    hidden, weight, bias = (torch.randn(shape, generator=g).to(dtype) for shape in ((M, H), (V, H), (V,)))
    target = torch.randint(0, classes, (M,), generator=g)
    target[::4] = ignore_index
    return [t.requires_grad_() for t in (hidden, weight, bias)] + [target]


def mine(t: Tensor, dim: int = 0) -> Tensor:
    return t.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone().requires_grad_()


def judge(got: Tensor, single: Tensor, exact: Tensor, name: str) -> None:
    error = (got.double() - exact).abs().max()
    limit = 3 * (single.double() - exact).abs().max() + 4 * torch.finfo(got.dtype).eps * exact.abs().max()
    assert error <= limit, (name, float(error), float(limit))


def same_bits(t: Tensor) -> None:
    every = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(every, t.detach())
    assert all(torch.equal(each, t) for each in every)


def single(dtype: torch.dtype, classes: int, options: dict[str, Any]) -> list[Tensor]:
    """Loss and gradients of one process, of the problem as float32 has it."""
    *leaves, target = problem(torch.float32, options.get("ignore_index", -100), classes)
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    loss = ops.linear_cross_entropy(*leaves[:2], target, leaves[2], **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, torch.linspace(1, 2, loss.numel()).view(loss.shape))]


def linear(name: str, classes: int = V) -> None:
    options = CASES[name]
    hidden, weight, bias, target = problem(torch.float32, options.get("ignore_index", -100), classes)
    leaves = hidden, mine(weight), mine(bias)
    loss = vocab_parallel_linear_cross_entropy(*leaves[:2], target, leaves[2], vocab_size=V, **options)
    dloss = torch.linspace(1, 2, loss.numel()).view(loss.shape)
    gradients = torch.autograd.grad(loss, leaves, dloss)
    same_bits(loss)
    same_bits(gradients[0])
    found = zip(
        ("loss", "dhidden", "dweight", "dbias"),
        (loss.detach(), *gradients),
        single(torch.float32, classes, options),
        single(torch.float64, classes, options),
        strict=True,
    )
    for what, got, one, exact in found:
        part = mine if what in ("dweight", "dbias") else torch.Tensor.detach
        judge(got, part(one), part(exact), f"{name}: {what}")


def logits(name: str) -> None:
    options = {k: v for k, v in CASES[name].items() if k != "chunk_rows"}
    torchs = {("weight" if k == "class_weight" else k): v for k, v in options.items()}
    hidden, weight, bias, target = problem(torch.float32, options.get("ignore_index", -100))
    x = F.linear(hidden, weight, bias).detach()
    leaf, whole, exact = mine(x, 1), x.clone().requires_grad_(), x.double().requires_grad_()
    losses = (
        vocab_parallel_cross_entropy(leaf, target, vocab_size=V, **options),
        ops.cross_entropy(whole, target, **torchs),
        ops.cross_entropy(exact, target, **torchs),
    )
    same_bits(losses[0])
    judge(*(loss.detach() for loss in losses), f"{name}: loss of logits")
    found = [torch.autograd.grad(loss.sum(), t)[0] for loss, t in zip(losses, (leaf, whole, exact), strict=True)]
    judge(found[0], mine(found[1], 1), mine(found[2], 1), f"{name}: dlogits")


def sixteen_bits() -> None:
    """Loss and gradient of bfloat16 logits have the bits of one process, but for the last place of float32."""
    hidden, weight, _, target = problem(torch.bfloat16)
    x = F.linear(hidden, weight).detach().view(1, M, V)
    leaf, whole = mine(x, 2), x.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, target.int()[None], vocab_size=V, reduction="none")
    wanted = ops.cross_entropy(whole, target[None], reduction="none")
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    (dleaf,), (dwhole,) = (torch.autograd.grad(t.sum(), leaf) for t, leaf in ((loss, leaf), (wanted, whole)))
    torch.testing.assert_close(dleaf, mine(dwhole, 2).detach(), rtol=2**-8, atol=0)


def infinities() -> None:
    """A slice of -inf alone, as a padded vocabulary has it, a target in it, a NaN, +inf, and a row of -inf."""
    x = torch.randn(6, V, generator=torch.Generator().manual_seed(1))
    x[:3, 16:] = -torch.inf
    x[3, 20], x[4, 2], x[5] = torch.nan, torch.inf, -torch.inf
    target = torch.tensor([3, 20, -100, 4, 5, 6])
    for smoothing in (0.0, 0.1):
        leaf, whole = mine(x, 1), x.clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(leaf, target, vocab_size=V, reduction="none", label_smoothing=smoothing)
        wanted = F.cross_entropy(whole, target, reduction="none", label_smoothing=smoothing)
        torch.testing.assert_close(loss, wanted, equal_nan=True)
        if not smoothing:
            (dleaf,), (dwhole,) = (torch.autograd.grad(t.sum(), leaf) for t, leaf in ((loss, leaf), (wanted, whole)))
            torch.testing.assert_close(dleaf, mine(dwhole, 1).detach(), equal_nan=True)


def tensor_parallel() -> None:
    """Modules divided by torch's plan, beside FSDP2 on the other dimension of a mesh."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "tensor"))
    hidden, weight, bias, target = problem(torch.float32)
    whole = LinearCrossEntropyLoss(H, V, bias=True, label_smoothing=0.1)
    with torch.no_grad():
        whole.linear.weight.copy_(weight)
        whole.linear.bias.copy_(bias)
    wanted = whole(hidden, target)
    wanted.backward()
    for sharded in (False, True):
        divided = VocabParallelLinearCrossEntropyLoss(H, V, bias=True, label_smoothing=0.1)
        divided.load_state_dict(whole.state_dict())
        parallelize_module(divided, mesh["tensor"], {"linear": ColwiseParallel()})
        if sharded:
            fully_shard(divided, mesh=mesh["data"])
        leaf = hidden.detach().clone().requires_grad_()
        given = leaf if sharded else DTensor.from_local(leaf, mesh["tensor"], [Replicate()])
        loss = divided(given, target)
        loss.backward()
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(leaf.grad, hidden.grad)
        for one, other in zip(divided.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    x = F.linear(hidden, weight).detach()
    placed = distribute_tensor(x, mesh["tensor"], [Shard(1)]).requires_grad_()
    loss = vocab_parallel_cross_entropy(placed, target)
    loss.backward()
    F.cross_entropy(x.requires_grad_(), target).backward()
    torch.testing.assert_close(placed.grad.full_tensor(), x.grad)
    replicated = distribute_tensor(x.detach(), mesh["tensor"], [Replicate()])
    with pytest.raises(InputError, match=r"placed \(Replicate\(\),\) .* needs Shard\(-1\)"):
        vocab_parallel_cross_entropy(replicated, target)
    with pytest.raises(InputError, match="which has its vocab_size"):
        vocab_parallel_cross_entropy(placed, target, vocab_size=V)
    divided = [distribute_tensor(t.detach(), mesh["tensor"], [Shard(0)]) for t in (hidden, weight)]
    with pytest.raises(InputError, match=r"hidden is a DTensor .* needs Replicate"):
        vocab_parallel_linear_cross_entropy(*divided, target)


def fully_sharded() -> None:
    """The module of one process under FSDP2: each rank has its own rows, and FSDP gathers the whole weight."""
    from torch.distributed.fsdp import fully_shard

    hidden, weight, _, target = problem(torch.float32)
    alone, sharded = (LinearCrossEntropyLoss(H, V) for _ in range(2))
    for module in (alone, sharded):
        with torch.no_grad():
            module.linear.weight.copy_(weight)
    fully_shard(sharded)
    rank, world = dist.get_rank(), dist.get_world_size()
    sharded(hidden[rank::world], target[rank::world]).backward()
    sum(alone(hidden[r::world], target[r::world]) / world for r in range(world)).backward()
    torch.testing.assert_close(sharded.linear.weight.grad.full_tensor(), alone.linear.weight.grad)


def every_case() -> None:
    for name in CASES:
        linear(name)
    linear("plain", classes=5)  # no target on the second rank
    with pytest.MonkeyPatch.context() as patch:  # one chunk of 15 classes has 11 rows, of 16 classes 10
        patch.setattr(chunks, "CHUNK_BYTES", M * 15 * 4)
        linear("plain")
    logits("plain")
    logits("all_none")
    sixteen_bits()
    infinities()
    tensor_parallel()
    fully_sharded()


def test_two_ranks(tmp_path: Path) -> None:
    on_two_ranks(every_case, tmp_path / "store")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    with group(tmp_path / "store", 0, 1):
        yield


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", CASES)
def test_one_rank(name: str) -> None:
    linear(name)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_gradients(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under no_grad a call computes no gradients, and its loss has the same bits."""
    hidden, weight, _, target = problem(torch.float32)
    loss = vocab_parallel_linear_cross_entropy(hidden, weight, target, vocab_size=V, reduction=reduction)
    monkeypatch.delattr(vocab_rows, "write_gradient")
    with torch.no_grad():
        again = vocab_parallel_linear_cross_entropy(hidden, weight, target, vocab_size=V, reduction=reduction)
    assert torch.equal(again, loss)


@pytest.mark.usefixtures("one_rank")
def test_no_rows() -> None:
    hidden, weight, _, target = problem(torch.float32)
    loss = vocab_parallel_linear_cross_entropy(hidden[:0], weight, target[:0], vocab_size=V, reduction="sum")
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.usefixtures("one_rank")
def test_a_gradient_that_is_used_twice() -> None:
    hidden, weight, _, target = problem(torch.float32)
    loss = vocab_parallel_linear_cross_entropy(hidden, weight, target, vocab_size=V)
    first = torch.autograd.grad(3 * loss, weight, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(3 * loss, weight), first, rtol=0, atol=0)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": V + 1}, rf"weight is \({V}, {H}\) on rank 0 of 1; needs {V + 1} classes, from 0 on"),
        ({"class_weight": torch.ones(3)}, rf"weight is \(3,\).*needs floating \({V},\)"),
        ({"chunk_rows": 0}, "chunk_rows is 0; needs 1 or more"),
        ({"bias": [0.0] * V}, "bias is a list; needs a tensor, or a DTensor"),
        ({"reduction": "batchmean"}, "reduction is 'batchmean'"),
        ({"ignore_index": 0}, f"target has -100; needs 0 to {V - 1}, or 0"),
    ],
)
def test_what_is_refused(options: dict[str, Any], match: str) -> None:
    hidden, weight, _, target = problem(torch.float32)
    with pytest.raises(InputError, match=match):
        vocab_parallel_linear_cross_entropy(hidden, weight, target, **{"vocab_size": V, **options})


@pytest.mark.usefixtures("one_rank")
def test_derivatives_that_are_refused() -> None:
    hidden, weight, _, target = problem(torch.float32)
    for reduction in ("mean", "none"):
        loss = vocab_parallel_linear_cross_entropy(hidden, weight, target, vocab_size=V, reduction=reduction)
        with pytest.raises(InputError, match="has no gradient of its gradient"):
            torch.autograd.grad(loss.sum(), hidden, create_graph=True)
    with forward_ad.dual_level(), pytest.raises(InputError, match="has no forward mode"):
        vocab_parallel_cross_entropy(hidden, target, vocab_size=H)


def test_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, _, _, target = problem(torch.float32)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(InputError, match="no process group"):
        vocab_parallel_cross_entropy(hidden, target, vocab_size=H)
