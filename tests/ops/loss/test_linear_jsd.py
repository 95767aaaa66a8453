"""linear_jsd: the divergence of all logits and its gradients, one chunk of logits at a time, without all of them."""

import pytest
import torch
import torch.nn.functional as F
from tests.ops.loss.test_linear_cross_entropy import Largest

from tilewright import ops
from tilewright.errors import InputError


def problem():
    student = torch.randn(11, 12, requires_grad=True), torch.randn(30, 12, requires_grad=True)
    teacher = torch.randn(11, 7), torch.randn(30, 7)
    target = torch.randint(0, 30, (11,))
    target[::4] = -100
    return *student, *teacher, target, torch.randn(30, requires_grad=True), torch.randn(30)


def with_all_logits(hidden, weight, teacher, teacher_weight, target, bias, teacher_bias, **options):
    return ops.jsd(F.linear(hidden, weight, bias), F.linear(teacher, teacher_weight, teacher_bias), target, **options)


@pytest.mark.parametrize("chunk_rows", [None, 4])
@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none"])
def test_loss_and_gradients_of_all_logits(reduction, beta, chunk_rows):
    given = problem()
    options = {"beta": beta, "temperature": 2.0, "reduction": reduction}
    loss, wanted = ops.linear_jsd(*given, chunk_rows=chunk_rows, **options), with_all_logits(*given, **options)
    torch.testing.assert_close(loss, wanted)
    leaves, dloss = (given[0], given[1], given[5]), torch.rand_like(loss)
    theirs = torch.autograd.grad(wanted, leaves, dloss)
    for _ in range(2):  # a graph that is kept has its gradients still
        torch.testing.assert_close(torch.autograd.grad(loss, leaves, dloss, retain_graph=True), theirs)
    assert not theirs[0][::4].any()


@pytest.mark.parametrize("reduction", ["batchmean", "sum", "none"])
def test_cross_entropy_in_part(reduction):
    given = problem()
    options = {"reduction": reduction, "chunk_rows": 4}
    loss = ops.linear_jsd(*given, hard_weight=0.3, **options)
    hidden, weight, _, _, target, bias, _ = given
    hard = F.cross_entropy(F.linear(hidden, weight, bias), target, reduction=reduction.removeprefix("batch"))
    wanted = 0.7 * ops.linear_jsd(*given, **options) + 0.3 * hard
    torch.testing.assert_close(loss, wanted)
    with torch.no_grad():
        torch.testing.assert_close(ops.linear_jsd(*given, hard_weight=0.3, **options), wanted)
    leaves, dloss = (hidden, weight, bias), torch.rand_like(loss)
    made = [torch.autograd.grad(t, leaves, dloss) for t in (loss, wanted)]
    torch.testing.assert_close(*made)


def test_a_graph_of_the_gradient():
    given, made = problem(), []
    for function in (ops.linear_jsd, with_all_logits):
        (dhidden,) = torch.autograd.grad(function(*given), given[0], create_graph=True)
        made.append(torch.autograd.grad(dhidden.square().sum(), given[1])[0])
    torch.testing.assert_close(*made)


def test_one_graph():
    given = problem()
    step = torch.compile(lambda *args: ops.linear_jsd(*args, chunk_rows=4), fullgraph=True, backend="aot_eager")
    loss, wanted, leaves = step(*given), with_all_logits(*given), (given[0], given[1], given[5])
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, leaves))


@pytest.mark.parametrize(("reduction", "hard_weight"), [("batchmean", 0.0), ("none", 0.0), ("sum", 0.5)])
def test_all_logits_never_exist(reduction, hard_weight):
    """The gradients are smaller than two rows of logits here: what is larger than a chunk would be logits."""
    hidden, weight = torch.randn(64, 2, requires_grad=True), torch.randn(1000, 2, requires_grad=True)
    with Largest() as seen:
        ops.linear_jsd(
            hidden,
            weight,
            hidden.detach() + 1,
            weight.detach(),
            torch.zeros(64, dtype=torch.int64),
            hard_weight=hard_weight,
            chunk_rows=4,
            reduction=reduction,
        ).sum().backward()
    assert 0 < seen.bytes <= 4 * 1000 * 4


def test_a_teacher_that_requires_a_gradient():
    hidden, weight, teacher, teacher_weight, *_ = problem()
    with pytest.raises(InputError, match="teacher_weight requires a gradient and has none"):
        ops.linear_jsd(hidden, weight, teacher, teacher_weight.requires_grad_())
