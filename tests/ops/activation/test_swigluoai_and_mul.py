"""swigluoai_and_mul(x): gpt-oss' clamped gate, of neighbours or of halves."""

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from tilewright.errors import InputError
from tilewright.ops.activation.swigluoai_and_mul import reference, swigluoai_and_mul

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPECIAL = [torch.inf, -torch.inf, torch.nan, 7.0, -7.0, 8.0, -8.0, 0.0]
KERNEL = [
    pytest.param("cpu", marks=pytest.mark.interp, id="interpreted"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="cuda"),
]


class Numbers:
    alpha, limit = 1.702, 7.0


def halves(x):
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_hugging_faces_formula_bit_for_bit(dtype):
    x = 4 * torch.randn(3, 17, 96).to(dtype)
    wanted = GptOssExperts._apply_gate(Numbers, x)
    assert torch.equal(swigluoai_and_mul(x), wanted)
    assert torch.equal(swigluoai_and_mul(halves(x), interleaved=False), wanted)


def test_minimax_m3s_form_is_the_same_on_halves():
    modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")

    class Numbers:
        swiglu_alpha, swiglu_limit = 1.5, 5.0

    x = 4 * torch.randn(9, 32).bfloat16()
    wanted = modeling.MiniMaxM3VLExperts._apply_gate(Numbers, x)
    assert torch.equal(swigluoai_and_mul(x, alpha=1.5, limit=5.0, interleaved=False), wanted)


@pytest.mark.parametrize("interleaved", [True, False])
def test_gradients_are_those_of_the_formula(interleaved):
    x = (4 * torch.randn(4, 16, dtype=torch.float64)).requires_grad_()

    def op(x):
        return swigluoai_and_mul(x, limit=3.0, interleaved=interleaved)

    assert torch.autograd.gradcheck(op, x)
    assert torch.autograd.gradgradcheck(op, x)


@pytest.mark.parametrize("device", KERNEL)
def test_both_layouts_have_the_same_bits_and_gradients(device):
    """A float32 result, rounded once: the model's own rounds every step."""
    pairs = (4 * torch.randn(5, 2 * 333, device=device)).bfloat16().requires_grad_()
    rows = halves(pairs).detach().requires_grad_()
    y, other = (swigluoai_and_mul(x, interleaved=kind, backend="triton") for x, kind in ((pairs, True), (rows, False)))
    assert torch.equal(y, other)
    once = reference(pairs.detach().float()).bfloat16()
    assert (y == once).float().mean() > 0.99
    dy = torch.randn_like(y)
    (d_pairs,), (d_rows,) = torch.autograd.grad(y, pairs, dy), torch.autograd.grad(other, rows, dy)
    assert torch.equal(halves(d_pairs), d_rows)


@pytest.mark.parametrize("device", KERNEL)
def test_special_values_and_their_gradients_are_torchs(device):
    gate, up = (t.flatten() for t in torch.meshgrid(*2 * (torch.tensor(SPECIAL),), indexing="ij"))
    x = torch.stack((gate, up), -1).flatten().to(device).requires_grad_()
    dy = torch.ones(64, device=device)
    y, wanted = swigluoai_and_mul(x, backend="triton"), reference(x)
    torch.testing.assert_close(y, wanted, equal_nan=True)
    ours, theirs = (torch.autograd.grad(t, x, dy)[0] for t in (y, wanted))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_a_limit_of_zero_or_nan_is_refused():
    for limit in (0.0, float("nan")):
        with pytest.raises(InputError, match="swigluoai_and_mul: limit is .*; needs a number above 0"):
            swigluoai_and_mul(torch.ones(4, 8), limit=limit)
