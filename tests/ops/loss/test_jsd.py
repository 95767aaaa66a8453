"""jsd: the formula of TRL's GKD trainer in float64, torch's kl_div at both ends of beta, ignored rows, odd numbers."""

import pytest
import torch
import torch.nn.functional as F
from tests.ops.sampling.places import everywhere

from tilewright import ops
from tilewright.errors import InputError
from tilewright.ops.loss.jsd import FORWARD, JsdArgs


def wanted(student, teacher, beta, temperature=1.0):
    """The divergence of each element of logits, as `generalized_jsd_loss` computes it."""
    q, p = (F.log_softmax(t / temperature, -1) for t in (student, teacher))
    if beta in (0, 1):
        return F.kl_div(*((q, p) if beta == 0 else (p, q)), reduction="none", log_target=True)
    b = torch.tensor(beta, dtype=q.dtype, device=q.device)
    mixture = torch.logsumexp(torch.stack([q + torch.log1p(-b), p + torch.log(b)]), 0)
    of_teacher, of_student = (F.kl_div(mixture, t, reduction="none", log_target=True) for t in (p, q))
    return beta * of_teacher + (1 - beta) * of_student


def problem(place, *shape):
    return tuple(3 * torch.randn(*shape, device=place.device) for _ in range(2))


@everywhere
@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 1])
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none"])
def test_trls_loss_and_gradient(reduction, beta, place):
    student, teacher = problem(place, 5, 37)
    target = torch.tensor([3, -100, 0, 1, -100], device=place.device)
    ours, theirs = student.requires_grad_(), student.detach().double().requires_grad_()
    loss = ops.jsd(ours, teacher, target, beta=beta, temperature=1.5, reduction=reduction, backend=place.backend)
    elements = wanted(theirs, teacher.double(), beta, 1.5)[target != -100]
    exact = {"batchmean": lambda: elements.sum() / 3, "mean": elements.mean, "sum": elements.sum}.get(reduction)
    if exact is None:
        rows = torch.zeros(5, dtype=torch.float64, device=place.device)
        rows[target != -100] = elements.sum(-1)
        exact = lambda: rows  # noqa: E731
    dloss = torch.rand_like(loss) + 0.5
    torch.testing.assert_close(loss.double(), exact(), rtol=1e-5, atol=1e-6)
    (dx,), (exact_dx,) = torch.autograd.grad(loss, ours, dloss), torch.autograd.grad(exact(), theirs, dloss.double())
    torch.testing.assert_close(dx.double(), exact_dx, rtol=1e-4, atol=1e-6)
    assert not dx[target == -100].any()


@everywhere
@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_log_probabilities(beta, place):
    """The gradient of a log-probability is that of torch's kl_div; that of logits follows through log_softmax."""
    student, teacher = problem(place, 4, 19)
    logits = student.requires_grad_()
    q = F.log_softmax(logits, -1)
    options = {"beta": beta, "backend": place.backend}
    loss = ops.jsd(q, F.log_softmax(teacher, -1), log_probs=True, **options)
    of_logits = ops.jsd(logits, teacher, **options)
    torch.testing.assert_close(loss, of_logits)
    dq, dx = torch.autograd.grad(loss, (q, logits))
    torch.testing.assert_close(dx, torch.autograd.grad(of_logits, logits)[0], rtol=1e-4, atol=1e-6)
    leaf = q.detach().double().requires_grad_()
    p = F.log_softmax(teacher.double(), -1)
    mixture = torch.log(beta * p.exp() + (1 - beta) * leaf.exp())
    if beta in (0, 1):
        exact = F.kl_div(*((leaf, p) if beta == 0 else (p, leaf)), reduction="batchmean", log_target=True)
    else:
        exact = (beta * p.exp() * (p - mixture) + (1 - beta) * leaf.exp() * (leaf - mixture)).sum() / 4
    torch.testing.assert_close(dq.double(), torch.autograd.grad(exact, leaf)[0], rtol=1e-4, atol=1e-6)


@everywhere
@pytest.mark.parametrize("log_probs", [False, True])
def test_total_variation(log_probs, place):
    """Half of torch's l1_loss of probabilities: 0 of a student that is its teacher, 1 of disjoint classes."""
    student, teacher = problem(place, 5, 37)
    student[3], teacher[3] = teacher[3].clone(), teacher[3]
    student[4, ::2], teacher[4, 1::2] = -torch.inf, -torch.inf
    if log_probs:
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    ours, theirs = student.requires_grad_(), student.detach().double().requires_grad_()
    options = {"kind": "tvd", "log_probs": log_probs, "reduction": "none", "backend": place.backend}
    loss = ops.jsd(ours, teacher, **options)
    q, p = (t.exp() if log_probs else t.softmax(-1) for t in (theirs, teacher.double()))
    exact = F.l1_loss(q, p, reduction="none").sum(-1) / 2
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
    assert loss[3] == 0
    torch.testing.assert_close(loss[4], torch.ones_like(loss[4]))
    dloss = torch.rand_like(loss) + 0.5
    (dx,), (exact_dx,) = torch.autograd.grad(loss, ours, dloss), torch.autograd.grad(exact, theirs, dloss.double())
    torch.testing.assert_close(dx.double(), exact_dx, rtol=1e-4, atol=1e-6)


@everywhere
@pytest.mark.parametrize("reduction", ["batchmean", "sum", "none"])
def test_nothing_but_ignored_rows(reduction, place):
    """What cross_entropy gives."""
    student, teacher = problem(place, 3, 16)
    target, leaf = torch.full((3,), -100, device=place.device), student.requires_grad_()
    loss = ops.jsd(leaf, teacher, target, reduction=reduction, backend=place.backend)
    mean = "mean" if reduction == "batchmean" else reduction
    cross = ops.cross_entropy(leaf, target, reduction=mean, backend=place.backend)
    torch.testing.assert_close(loss, cross, equal_nan=True)
    made = [torch.autograd.grad(t, leaf, torch.ones_like(t))[0] for t in (loss, cross)]
    torch.testing.assert_close(*made, rtol=0, atol=0)


@everywhere
@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_a_student_that_is_its_teacher(beta, place):
    """Loss and gradient are 0, also with classes of probability 0, in rows of one step and of more."""
    for n in (21, 4500):
        teacher = problem(place, 2, n)[0]
        teacher[:, ::4] = -torch.inf
        leaf = teacher.clone().requires_grad_()
        loss = ops.jsd(leaf, teacher, beta=beta, backend=place.backend)
        assert loss == 0
        torch.testing.assert_close(*(torch.autograd.grad(loss, leaf)[0], torch.zeros_like(leaf)), rtol=0, atol=1e-7)


@everywhere
def test_classes_of_one_side(place):
    """A class that the student excludes: infinite forward, finite otherwise; the other way round in reverse."""
    inf = torch.inf
    student = torch.tensor([[0.0, -inf, 1.0], [0.0, 1.0, 2.0]], device=place.device)
    teacher = torch.tensor([[0.0, 0.5, 1.0], [0.0, -inf, 2.0]], device=place.device)
    made = [ops.jsd(student, teacher, beta=b, reduction="none", backend=place.backend) for b in (0, 0.5, 1)]
    assert [torch.isinf(t).tolist() for t in made] == [[True, False], [False, False], [False, True]]
    assert all((t > 0).all() for t in made)
    student[0, 0] = torch.nan
    assert ops.jsd(student, teacher, reduction="none", backend=place.backend).isnan().tolist() == [True, False]


@everywhere
def test_ignored_rows_are_not_read(place):
    student, teacher = problem(place, 3, 12)
    student[1], teacher[1] = torch.nan, torch.inf
    target, leaf = torch.tensor([0, 7, 0], device=place.device), student.requires_grad_()
    loss = ops.jsd(leaf, teacher, target, ignore_index=7, backend=place.backend)
    (dx,) = torch.autograd.grad(loss, leaf)
    assert loss.isfinite() and dx.isfinite().all() and not dx[1].any()


@pytest.mark.parametrize("beta", [0, 0.4, 1])
def test_derivatives_of_the_reference(beta):
    student, teacher = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.randn(3, 5).double()
    target = torch.tensor([0, -100, 2])

    def loss(x):
        return ops.jsd(x, teacher, target, beta=beta, temperature=2.0, backend="torch")

    assert torch.autograd.gradcheck(loss, student, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, student)


def test_a_teacher_that_requires_a_gradient():
    student, teacher = torch.randn(2, 8), torch.randn(2, 8, requires_grad=True)
    with pytest.raises(InputError, match=r"teacher requires a gradient and has none. Use teacher.detach\(\)"):
        ops.jsd(student, teacher)
    with torch.no_grad():
        ops.jsd(student, teacher)


@pytest.mark.interp
@pytest.mark.parametrize("log_probs", [False, True])
@pytest.mark.parametrize(("kind", "beta"), [("jsd", 0.0), ("jsd", 0.3), ("jsd", 1.0), ("tvd", 0.5)])
def test_a_kernel_reads_the_statistics_of_either_forward(kind, beta, log_probs):
    student, teacher = torch.randn(2, 5, 37).unbind()
    if log_probs:
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    target = torch.tensor([3, -100, 0, 1, -100])
    args = JsdArgs(student, teacher, target, beta, 1.0 if log_probs else 1.5, -100, "sum", log_probs, kind)
    for ours, wanted in zip(FORWARD(*args, "triton", "default"), FORWARD.plain(*args), strict=True):
        torch.testing.assert_close(ours, wanted)
