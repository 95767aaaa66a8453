"""How far an attention may be from the exact one, element by element: the formula in float64, and what float32 scores
and probabilities of 16 bits may change of it.

A score is a sum of D products, off by a small multiple of sqrt(D) roundings, or D / 8 of them where matrix units cut;
an error d of all scores changes a probability by a factor of exp(2 d) at most.  Probabilities are rounded once to v's
dtype.  Nothing is fitted: a lost tile of keys, a wrong mask or a missing rescale is outside.
"""

import torch

from tilewright.errors import InputError
from tilewright.ops.attention.score import split

TILE = 64
EXPONENTIAL = 2.0**-18
"""What exp, tanh and the running rescale of a GPU are off by."""


def exact(
    q, k, v, *, mask=None, causal=False, scale=None, score_mod=None, sinks=None, softcap=None, layout="BHSD", **ignored
):
    """(o, lse, off, lse_off) in float64, by head: the formula, and how far o and lse may be before they are rounded."""
    u = 0.0 if q.dtype in (torch.float32, torch.float64) else torch.finfo(v.dtype).eps / 2
    if layout == "BSHD":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    (batch, heads, s_q, d), s_k = q.shape, k.shape[2]
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // k.shape[1], 1) for t in (k, v))
    scale = d**-0.5 if scale is None else scale
    scores = split("bounds", score_mod, softcap, sinks)
    if scores.rest:
        raise InputError("bounds: native modifiers alone")
    s = scale * (q @ k.mT)
    wrong = 2.0**-24 * (4 * d**0.5 + d / 8) * abs(scale) * (q.abs() @ k.abs().mT)
    if scores.softcap:
        s = scores.softcap * torch.tanh(s / scores.softcap)
        wrong = wrong + EXPONENTIAL * scores.softcap
    distance = torch.arange(s_q, device=q.device)[:, None] + (s_k - s_q) - torch.arange(s_k, device=q.device)
    if scores.slopes is not None:
        s = s - scores.slopes.double()[:, None, None] * distance.abs()
    wrong = wrong + 4 * 2.0**-24 * s.abs()
    allowed = torch.ones(batch, heads, s_q, s_k, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed & (distance >= 0)
    if mask is not None:
        allowed = allowed & mask.dense(batch, heads, s_q, s_k, q.device)
    s = s.masked_fill(~allowed, -torch.inf)
    wrong = wrong.masked_fill(~allowed, 0.0)
    joined = s
    if scores.sinks is not None:
        joined = torch.cat((s, scores.sinks.double()[:, None, None].expand(batch, heads, s_q, 1)), -1)
    lse = torch.logsumexp(joined, -1) if joined.shape[-1] else s.new_full(s.shape[:3], -torch.inf)
    p = torch.where(allowed, torch.exp(s - lse[..., None]), 0.0)
    most = wrong.amax(-1, keepdim=True) if s_k else wrong.sum(-1, keepdim=True)
    off = (u + 2 * torch.expm1(most) + EXPONENTIAL) * (p @ v.abs())
    return p @ v, lse, off, most.squeeze(-1) + EXPONENTIAL * (1 + lse.abs().nan_to_num(posinf=0.0))


def faults(made, wanted, off):
    """The tiles (head, rows, columns) of `made` (B, H, S, D) in which an element is further away than allowed."""
    info = torch.finfo(made.dtype)
    allowed = off + 0.5001 * info.eps * (wanted.abs() + off) + info.smallest_normal * info.eps
    wrong = (made.double() - wanted).abs() > allowed
    wrong |= made.isnan() != wanted.isnan()
    return sorted({(int(h), int(i) // TILE, int(j) // TILE) for _, h, i, j in wrong.nonzero()})


def check(made, q, k, v, **options):
    """Every element of the result is as near as the formula's arithmetic allows; lse too, where it is asked for."""
    wanted, lse, off, lse_off = exact(q, k, v, **options)
    if options.get("return_lse"):
        made, found = made
        assert found.shape == lse.shape
        assert torch.equal(found.isinf(), lse.isinf())
        assert bool(((found.double() - lse).abs() <= lse_off)[~lse.isinf()].all())
    if options.get("layout") == "BSHD":
        made = made.transpose(1, 2)
    assert made.shape == wanted.shape
    assert faults(made, wanted, off) == []


def problem(b, h, h_kv, s_q, s_k, d, d_v=None, *, dtype, device, spread=1.0):
    """Normal q, k, v by head."""
    shapes = ((b, h, s_q, d), (b, h_kv, s_k, d), (b, h_kv, s_k, d_v or d))
    return [(spread * torch.randn(shape)).to(device=device, dtype=dtype) for shape in shapes]


def gradients(function, tensors, cotangents, **options):
    """Gradients of `tensors`, None among the cotangents for an output that is not used."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = function(*leaves[:3], **options, **({"sinks": leaves[3]} if len(leaves) > 3 else {}))
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    used = [(o, g) for o, g in zip(outputs, cotangents, strict=True) if g is not None]
    return torch.autograd.grad([o for o, _ in used], leaves, [g for _, g in used])
