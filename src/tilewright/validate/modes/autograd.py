"""Autograd beyond one backward: gradients of some inputs, recomputed forwards, double backward, forward mode, and views
that only autograd creates.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpointed

from tilewright.dispatch import Sample
from tilewright.dispatch.effects import as_tuple
from tilewright.validate.bits import replicas
from tilewright.validate.case import Case, Findings, NotApplicable, tensors
from tilewright.validate.modes.accuracy import needs_gradient
from tilewright.validate.modes.registry import mode
from tilewright.validate.oracle import Derivation, Truth, argument_names, derive_standards, truth
from tilewright.validate.rule import Standard


@mode("grad_inputs")
def grad_inputs(case: Case, findings: Findings) -> None:
    """Every input requires a gradient and one is requested: it is right, and no other tensor's `.grad` is written."""
    needs_gradient(case)
    for i in case.positions:
        name = case.truth.gradients[i].name
        for way in ("autograd.grad", "backward(inputs=)"):
            sample, leaves = _with_leaves(case)
            with torch.enable_grad():
                outputs = as_tuple(case.function(*sample.args, **sample.kwargs))
            used, cotangents = _used(outputs, replicas(case.truth.cotangents))
            grad: Tensor | None
            if way == "autograd.grad":
                (grad,) = torch.autograd.grad(used, [leaves[i]], cotangents, allow_unused=True)
            else:
                torch.autograd.backward(used, cotangents, inputs=[leaves[i]])
                grad, leaves[i].grad = leaves[i].grad, None
            findings.gradients({i: grad}, f"{way}, only {name}: ")
            written = [case.truth.gradients[j].name for j, leaf in leaves.items() if leaf.grad is not None]
            findings.require(not written, f"{way}, only {name}: wrote {', '.join(written)} too")


@mode("checkpoint")
def checkpoint(case: Case, findings: Findings) -> None:
    """Inside torch.utils.checkpoint(use_reentrant=False): the backward computes the forward again."""
    needs_gradient(case)
    outputs, grads = case.differentiate(
        case.sample(), function=partial(checkpointed, case.function, use_reentrant=False)
    )
    findings.outputs(outputs)
    findings.gradients(grads)


@mode("double_backward", heavy=True)
def double_backward(case: Case, findings: Findings) -> None:
    """Gradients of a gradient penalty, sum(grad * v): by the inputs, and by the cotangents where these require one."""
    needs_gradient(case)
    vectors = _like_inputs(case, 1)
    compute = partial(_twice, case, True)
    extras = (*case.truth.cotangents, *vectors)
    standards = _derived(case, extras, compute, "gradient of a gradient")
    for prefix, with_cotangents in (("cotangents are constants: ", False), ("", True)):
        results = _twice(case, with_cotangents, case.function, case.sample(), replicas(extras))
        _judge(findings, standards, results, prefix)


@mode("forward_ad", heavy=True)
def forward_ad(case: Case, findings: Findings) -> None:
    """Forward mode, by dual tensors and by torch.func.jvp: outputs and their tangents."""
    needs_gradient(case)
    tangents = _like_inputs(case, 2)
    standards = _derived(case, tangents, partial(_duals, case), "forward mode")
    for prefix, way in (("dual tensors: ", _duals), ("func.jvp: ", _jvp)):
        _judge(findings, standards, way(case, case.function, case.sample(), replicas(tangents)), prefix)


@mode("negative_bit")
def negative_bit(case: Case, findings: Findings) -> None:
    """Memory that is not the value: views whose sign is a bit, imaginary parts of conjugates, zeros without memory."""
    for name, change in (("negative views", _negative), ("imaginary parts of conjugates", _imaginary)):
        sample = case.mapped(change, mutated=False)  # ops refuse to write into such tensors
        if not any(t.is_neg() for t in tensors(sample)):
            continue
        with findings.part(name) as prefix:
            outputs: Sequence[Tensor] = case.call(sample)
            grads: dict[int, Tensor | None] = {}
            if case.positions:
                cotangents = [change(c) for c in case.truth.cotangents]
                _, grads = case.differentiate(case.mapped(change), None, cotangents)
            trial = _judged(case, case.truth, outputs, grads, prefix)
            if trial.faults:  # torch may run another kernel for views, too: then judge by its errors on the views
                cotangents = [change(c) for c in case.truth.cotangents]
                view_truth = truth(case.contract, case.mapped(change, mutated=False), case.seed, cotangents)
                trial = _judged(case, view_truth, outputs, grads, prefix)
            findings.adopt(trial)
    if case.positions:
        _zero_cotangents(case, findings)
    if not findings.judged and not findings.refusals:
        raise NotApplicable("no input is of a type that has such views")


def _judged(
    case: Case, against: Truth, outputs: Sequence[Tensor], grads: dict[int, Tensor | None], prefix: str
) -> Findings:
    trial = Findings(case)
    trial.outputs(outputs, prefix, against)
    trial.gradients(grads, prefix, against)
    return trial


def _zero_cotangents(case: Case, findings: Findings) -> None:
    """Compare zero cotangents without memory, which autograd creates, with zeros in memory."""
    zeros = [torch.zeros_like(c) for c in case.truth.cotangents]
    lazy_zeros = [torch._efficientzerotensor(c.shape, dtype=c.dtype, device=c.device) for c in zeros]
    _, expected = case.differentiate(case.sample(), None, zeros, case.contract.reference)
    _, grads = case.differentiate(case.sample(), None, lazy_zeros)
    for i, grad in grads.items():
        ours, theirs = (_dense(t, case.sample().args[i]).nan_to_num(7.0) for t in (grad, expected[i]))
        findings.require(
            torch.equal(ours, theirs),
            f"zero cotangents without memory: {case.truth.gradients[i].name} is not that of zeros",
        )


def _with_leaves(case: Case) -> tuple[Sample, dict[int, Tensor]]:
    """A sample whose differentiable inputs are leaves, and the leaves by position."""
    sample = case.sample()
    args = list(sample.args)
    for i in case.positions:
        args[i] = args[i].detach().requires_grad_()
    return Sample(tuple(args), sample.kwargs), {i: args[i] for i in case.positions}


def _used(outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs that depend on a leaf, and their cotangents."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    return [o for o, _ in pairs], [c for _, c in pairs]


def _like_inputs(case: Case, salt: int) -> tuple[Tensor, ...]:
    """Normal values for each differentiable input."""
    generator = torch.Generator().manual_seed(case.seed + salt)
    args = case.sample().args
    return tuple(torch.randn(args[i].shape, generator=generator).to(args[i]) for i in case.positions)


def _derived(case: Case, extras: Sequence[Tensor], compute: Derivation, what: str) -> dict[str, Standard]:
    try:
        return derive_standards(case.contract, case.sample(), case.seed, extras, compute)
    except NotImplementedError as error:
        raise NotApplicable(f"the reference has no {what}: {error}") from error


def _judge(findings: Findings, standards: dict[str, Standard], results: dict[str, Any], prefix: str) -> None:
    for name, ours in results.items():
        findings.measure(standards[name].judge(ours), prefix)


def _twice(
    case: Case, with_cotangents: bool, function: Callable[..., Any], sample: Sample, extras: Sequence[Tensor]
) -> dict[str, Any]:
    """Gradients of sum(grad * v) with respect to the inputs, and with `through` also to the cotangents."""
    reference = function is case.contract.reference
    count, names = len(case.truth.cotangents), argument_names(case.contract)
    args = list(sample.args)
    for i in case.positions:
        args[i] = args[i].detach().requires_grad_()
    leaves = {f"dd{names[i]}": args[i] for i in case.positions}
    cotangents = [c.detach().requires_grad_(with_cotangents and c.is_floating_point()) for c in extras[:count]]
    if with_cotangents:
        named = zip(case.truth.outputs, cotangents, strict=True)
        leaves |= {f"dd{s.name}": c for s, c in named if c.is_floating_point()}
    with torch.enable_grad():
        outputs = as_tuple(function(*args, **sample.kwargs))
        used, weights = _used(outputs, cotangents)
        inputs = [args[i] for i in case.positions]
        grads = torch.autograd.grad(used, inputs, weights, create_graph=True, allow_unused=True)
        pairs = [(g, v) for g, v in zip(grads, extras[count:], strict=True) if g is not None and g.requires_grad]
        grad_grads: Sequence[Tensor | None] = [None] * len(leaves)
        if pairs:
            grad_grads = torch.autograd.grad(
                [g for g, _ in pairs], list(leaves.values()), [v for _, v in pairs], allow_unused=True
            )
    results = dict(zip(leaves, grad_grads, strict=True))
    return {name: _dense(t, leaves[name]) for name, t in results.items()} if reference else results


def _duals(case: Case, function: Callable[..., Any], sample: Sample, tangents: Sequence[Tensor]) -> dict[str, Any]:
    """Outputs and tangents of the function on dual tensors."""
    args = list(sample.args)
    with forward_mode.dual_level():
        for i, tangent in zip(case.positions, tangents, strict=True):
            args[i] = forward_mode.make_dual(args[i], tangent)
        pairs = [forward_mode.unpack_dual(o) for o in as_tuple(function(*args, **sample.kwargs))]
        return _named(case, function, [p.primal for p in pairs], [p.tangent for p in pairs])


def _jvp(case: Case, function: Callable[..., Any], sample: Sample, tangents: Sequence[Tensor]) -> dict[str, Any]:
    """Outputs and tangents of the function by torch.func.jvp."""
    args = list(sample.args)

    def of_inputs(*inputs: Tensor) -> tuple[Tensor, ...]:
        for i, value in zip(case.positions, inputs, strict=True):
            args[i] = value
        return as_tuple(function(*args, **sample.kwargs))

    result = torch.func.jvp(of_inputs, tuple(args[i] for i in case.positions), tuple(tangents))
    return _named(case, function, result[0], result[1])


def _named(
    case: Case, function: Callable[..., Any], primals: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> dict[str, Any]:
    if function is case.contract.reference:  # an output that depends on no input has no tangent
        tangents = [_dense(t, p) for t, p in zip(tangents, primals, strict=True)]
    names = [s.name for s in case.truth.outputs]
    pushed = {f"tangent of {name}": t for name, t in zip(names, tangents, strict=True)}
    return dict(zip(names, primals, strict=True)) | pushed


def _dense(value: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if value is None else value.detach().clone()


def _negative(t: Tensor) -> Tensor:
    """The same numbers, as a negative view of -t."""
    return torch._neg_view(t.neg()) if t.is_floating_point() and t.element_size() > 1 else t


def _imaginary(t: Tensor) -> Tensor:
    """The same numbers, as the imaginary part of a conjugated complex tensor, where torch has that dtype."""
    return torch.complex(torch.zeros_like(t), -t).conj().imag if t.dtype in (torch.float32, torch.float64) else t
