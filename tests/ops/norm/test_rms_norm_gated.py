"""rms_norm_gated: the modules of the models it stands for, bit for bit; the formulas of its gradients; its errors."""

import importlib

import pytest
import torch

from tilewright import ops
from tilewright.errors import InputError
from tilewright.nn import RMSNormGated

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
N = 96
FIRST = {"norm_before_gate": False}
MODELS = {
    "qwen3_next.Qwen3NextRMSNormGated": ({}, {}),
    "olmo_hybrid.OlmoHybridRMSNormGated": ({}, {}),
    "mamba2.MambaRMSNormGated": ({}, FIRST),
    "bamba.BambaRMSNormGated": ({}, FIRST),
    "granitemoehybrid.GraniteMoeHybridRMSNormGated": ({}, FIRST),
    "zamba2.Zamba2RMSNormGated": ({"group_size": 24}, {**FIRST, "group_size": 24}),
    "falcon_h1.FalconH1RMSNormGated": ({"n_groups": 4}, {"fp32_weight": True, "group_size": 24}),
    "falcon_h1.FalconH1RMSNormGated/gate first": (
        {"n_groups": 4, "norm_before_gate": False},
        {**FIRST, "fp32_weight": True, "group_size": 24},
    ),
    "kimi_linear.KimiLinearRMSNormGated": ({}, {"fp32_weight": True, "activation": "sigmoid"}),
}
FORMS = ({}, FIRST, {"group_size": 24}, {**FIRST, "group_size": 24}, {"fp32_weight": True, "activation": "sigmoid"})


def module_of(name, options):
    """A module of transformers with a random weight; skips where the release does not have it."""
    model, _, cls = name.partition("/")[0].partition(".")
    try:
        file = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        module = getattr(file, cls)(N, eps=1e-5, **options)
    except (ImportError, AttributeError) as error:
        pytest.skip(f"not in this transformers: {error}")
    torch.nn.init.normal_(module.weight)
    return module


def tensors(dtype, device="cpu", n=N, rows=(3, 5)):
    """x, gate, weight, dy."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((*rows, n), (*rows, n), (n,), (*rows, n))
    return [torch.randn(shape, generator=rng).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_models_module_bit_for_bit(name):
    theirs, ours = MODELS[name]
    for dtype in DTYPES:
        module = module_of(name, theirs).to(dtype)
        x, gate, *_ = tensors(dtype)
        with torch.no_grad():
            y = ops.rms_norm_gated(x, gate, module.weight, eps=1e-5, **ours, backend="torch")
            wanted = module(x, gate)
        assert y.dtype == wanted.dtype
        assert torch.equal(y, wanted)


def test_the_forms_differ_so_that_none_can_pass_for_another():
    x, gate, weight, _ = tensors(torch.bfloat16)
    results = [ops.rms_norm_gated(x, gate, weight, **form) for form in (*FORMS, {"fp32_weight": True})]
    for i, y in enumerate(results):
        assert not any(torch.equal(y, other) for other in results[:i])


def test_the_dtype_of_the_result():
    """A wider weight promotes what is rounded before it, and nothing else."""
    x, gate, weight, _ = tensors(torch.bfloat16)
    weight = weight.float()
    assert ops.rms_norm_gated(x, gate, weight, **FIRST).dtype == torch.float32
    for form in ({}, {"fp32_weight": True}, {**FIRST, "fp32_weight": True}):
        assert ops.rms_norm_gated(x, gate, weight, **form).dtype == torch.bfloat16


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_gradient_is_that_of_the_formula(form):
    x, gate, weight, dy = tensors(torch.float64, rows=(5,))
    leaves = [t.requires_grad_() for t in (x, gate, weight)]
    found = torch.autograd.grad(ops.rms_norm_gated(*leaves, eps=1e-3, **form), leaves, dy)
    s = torch.sigmoid(gate)
    silu = form.get("activation") != "sigmoid"
    act, slope = (gate * s, s + gate * s * (1 - s)) if silu else (s, s * (1 - s))
    first = "norm_before_gate" in form
    u, dnorm = (x * act, dy) if first else (x, dy * act)
    mean = lambda t: t.unflatten(-1, (-1, form.get("group_size", N))).mean(-1, keepdim=True)  # noqa: E731
    wide = lambda t: t.expand(*t.shape[:-1], form.get("group_size", N)).flatten(-2)  # noqa: E731
    rstd = wide((mean(u * u) + 1e-3).rsqrt())
    u_hat, wdy = u * rstd, weight * dnorm
    du = rstd * (wdy - u_hat * wide(mean(wdy * u_hat)))
    wanted = (du * act, du * x * slope) if first else (du, dy * weight * u_hat * slope)
    for ours, theirs in zip(found, (*wanted, (dnorm * u_hat).sum(0)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_take_views_and_gates_of_any_size(device, form):
    """Gates whose sigmoid is 0 or 1 in float32, and rows that are columns of another tensor."""
    x, gate, weight, dy = tensors(torch.float32, device, rows=(6,))
    gate = gate * torch.tensor([1.0, 30.0, 120.0], device=device).repeat(2)[:, None]
    x, gate = torch.cat((x, dy), 1)[:, :N], gate.t().contiguous().t()
    results = []
    for backend in ("triton", "torch"):
        leaves = [t.detach().requires_grad_() for t in (x, gate, weight)]
        y = ops.rms_norm_gated(*leaves, **form, backend=backend)
        results.append((y.detach(), *torch.autograd.grad(y, leaves, dy)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "size"), [(8200, 8192), (3072, 3072)], ids=["blocks", "parts"])
def test_the_kernels_of_long_groups(device, form, n, size):
    """Rows of 8200 and groups of 8192 columns: longer than the registers of the backward, and of the forward; rows and
    groups of 3072, whose backward holds three parts.
    """
    n, size = (2 * size, size) if "group_size" in form else (n, None)
    x, gate, weight, dy = tensors(torch.float32, device, n=n, rows=(2,))
    results = []
    for backend in ("triton", "torch"):
        leaves = [t.detach().requires_grad_() for t in (x, gate, weight)]
        y = ops.rms_norm_gated(*leaves, **{**form, "group_size": size}, backend=backend)
        results.append((y.detach(), *torch.autograd.grad(y, leaves, dy)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_that_are_none_stay_in_their_row(device):
    """As torch: NaN or infinity in x takes the row; a gate of -inf gives NaN in the form that multiplies by it last."""
    x, gate, weight, _ = tensors(torch.float32, device, rows=(4,))
    x[0, 3], x[1, 5], gate[2, 7] = torch.nan, torch.inf, -torch.inf
    for form in ({}, FIRST):
        ours, theirs = (ops.rms_norm_gated(x, gate, weight, **form, backend=b) for b in ("triton", "torch"))
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        assert ours[3].isfinite().all()


def test_the_module_is_the_op():
    module = RMSNormGated(N, norm_before_gate=False, group_size=24)
    torch.nn.init.normal_(module.weight)
    x, gate, *_ = tensors(torch.float32)
    assert torch.equal(module(x, gate), ops.rms_norm_gated(x, gate, module.weight, **FIRST, group_size=24))
    assert [*module.state_dict()] == ["weight"]
    assert repr(module) == "RMSNormGated(96, eps=1e-06, norm_before_gate=False, group_size=24)"


def test_errors_say_what_was_given_and_what_is_allowed():
    x, weight = torch.ones(4, 8), torch.ones(8)
    with pytest.raises(InputError, match=r"rms_norm_gated: gate is \(4, 1\) torch\.float32, x is \(4, 8\)"):
        ops.rms_norm_gated(x, x[:, :1], weight)
    with pytest.raises(InputError, match=r"rms_norm_gated: group_size is 3, N is 8; needs a divisor of N\."):
        ops.rms_norm_gated(x, x, weight, group_size=3)
    with pytest.raises(InputError, match=r"rms_norm_gated: activation is 'gelu'; needs one of 'silu', 'sigmoid'\."):
        ops.rms_norm_gated(x, x, weight, activation="gelu")
    with pytest.raises(InputError, match=r"rms_norm_gated: weight is \(7,\); needs \(8,\)"):
        ops.rms_norm_gated(x, x, weight[:7])
