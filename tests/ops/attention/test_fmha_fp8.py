"""fmha_fp8: every key has its weight and its scale, lse is as exact as float8 products are, and what is refused.

Values pick out groups of keys, so that a result is the weight of its group: positive terms alone, each off by at most
half a step of e4m3.  A lost tile, a scale of another block and a shifted rescale are outside, and no luck is in it.
"""

from importlib import import_module
from typing import Any

import pytest
import torch
from tests.ops.gemm.bounds import FP8_SUM, Place, run
from torch import Tensor

from tilewright import mask as masks
from tilewright import ops
from tilewright.dispatch import Sample, contract, explain
from tilewright.errors import InputError
from tilewright.ops.attention.fmha_fp8 import reference
from tilewright.ops.attention.fmha_fp8.rounding import SCALE_BLOCK, SHIFT

E4M3 = torch.float8_e4m3fn
HALF_STEP = 2.0**-4
SMALLEST = 2.0 ** (-10 - SHIFT)  # half of e4m3's least number, of a probability whose row has its largest at 1
FLOAT32 = 2.0**-20  # of sum |q||k|, where products are summed in float32
GROUP = 16

PLACES = [
    pytest.param(Place("cpu", "torch"), id="cpu-torch"),
    pytest.param(Place("cpu", "triton"), id="interp", marks=pytest.mark.interp),
    *(pytest.param(Place("cuda", name), id=name, marks=pytest.mark.gpu) for name in ("cuda", "triton", "torch")),
]
on_every_place = pytest.mark.parametrize("place", PLACES)


def problem(s_q: int, s_k: int, d: int, heads: int = 4, heads_kv: int = 2, blocks: str = "", device: str = "cpu"):
    """q, k random; v (.., s_k, s_k / GROUP): 1 where a key is in the group; scales of two octaves.

    There are groups without keys: the number of columns is a multiple of 16, as the TMA needs.
    """

    def scales(name: str, h: int, s: int) -> Tensor:
        count = (-(-s // SCALE_BLOCK),) if name in blocks else ()
        return torch.exp2(2 * torch.rand(2, h, *count) - 1)

    groups = -(-s_k // GROUP**2) * GROUP
    v = torch.zeros(2, heads_kv, s_k, groups)
    v[:, :, torch.arange(s_k), torch.arange(s_k) // GROUP] = 1.0
    tensors = [torch.randn(2, heads, s_q, d).to(E4M3), torch.randn(2, heads_kv, s_k, d).to(E4M3), v.to(E4M3)]
    tensors += [scales("q", heads, s_q), scales("k", heads_kv, s_k), scales("v", heads_kv, s_k)]
    return [t.to(device) for t in tensors]


def tokens(scales: Tensor, s: int) -> Tensor:
    """One scale a token, (B, H, s, 1) float64."""
    if scales.dim() == 2:
        return scales.double()[..., None, None].expand(-1, -1, s, 1)
    return scales.double().repeat_interleave(SCALE_BLOCK, 2)[:, :, :s, None]


def exact(q, k, v, q_scale, k_scale, v_scale, *, mask=None, sinks=None, softcap=None, scale=None, **ignored: Any):
    """(o, lse, of_scores) in float64, from the formula: the last is sum |q||k|, scaled, at most of what a row sees."""
    (_, heads, s_q, d), s_k = q.shape, k.shape[2]
    rows, keys, values = (t.double() * tokens(s, t.shape[2]) for t, s in ((q, q_scale), (k, k_scale), (v, v_scale)))
    keys, values = (t.repeat_interleave(heads // k.shape[1], 1) for t in (keys, values))
    scale = d**-0.5 if scale is None else scale
    s, size = scale * rows @ keys.mT, abs(scale) * rows.abs() @ keys.abs().mT
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if mask is not None:
        seen = mask.dense(q.shape[0], heads, s_q, s_k, q.device)
        s, size = s.masked_fill(~seen, -torch.inf), size.masked_fill(~seen, 0.0)
    joined = s
    if sinks is not None:
        joined = torch.cat((s, sinks.double()[:, None, None].expand(*s.shape[:3], 1)), -1)
    lse = torch.logsumexp(joined, -1)
    p = torch.where(s == -torch.inf, 0.0, torch.exp(s - lse[..., None]))
    return p @ values, lse, size.amax(-1), p.amax(-1, keepdim=True) * SMALLEST * values.sum(2, keepdim=True)


CASES: dict[str, dict[str, Any]] = {
    "heads": {},
    "blocks of all": {"blocks": "qkv"},
    "blocks of q": {"blocks": "q"},
    "blocks of k": {"blocks": "k", "mask": masks.causal()},
    "blocks of v": {"blocks": "v", "mask": masks.window(150, 20)},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(40), "blocks": "kv"},
    "prefix": {"mask": masks.causal() | masks.prefix(40), "blocks": "k"},
    "sinks": {"sinks": torch.tensor([1.5, -2.0, 0.0, 4.0]), "mask": masks.causal()},
    "softcap": {"softcap": 2.0, "blocks": "k"},
    "negative scale": {"scale": -0.1},
    "one query": {"s_q": 1, "mask": masks.causal()},
    "few queries": {"s_q": 20, "blocks": "qkv", "mask": masks.causal()},
    "fewer keys": {"s_q": 90, "s_k": 33, "mask": masks.causal()},
    "one key head": {"heads_kv": 1},
    "wide": {"d": 256, "s_q": 150},
    "no power of two": {"d": 72, "s_q": 70},
}
SHAPE = ("s_q", "s_k", "d", "heads", "heads_kv", "blocks")


@on_every_place
@pytest.mark.parametrize("name", CASES)
def test_every_group_of_keys_has_its_weight(name, place):
    case = {"s_q": 200, "s_k": 270, "d": 64, **CASES[name]}
    if place.backend == "cuda" and case["d"] % 16:
        pytest.skip("the TMA addresses rows at multiples of 16 bytes")
    tensors = problem(**{n: case[n] for n in SHAPE if n in case}, device=place.device)
    options = {n: v for n, v in case.items() if n not in SHAPE}
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(place.device)
    o, lse = run(ops.fmha_fp8, *tensors, place=place, return_lse=True, out_dtype=torch.float32, **options)
    wanted, wanted_lse, size, tiny = exact(*tensors, **options)
    unit = FP8_SUM if place.device == "cuda" and place.backend != "torch" else FLOAT32
    off = unit * size + 2.0**-18 * (1 + wanted_lse.nan_to_num(neginf=0.0).abs())
    assert torch.equal(lse.isinf(), wanted_lse.isinf())
    assert bool(((lse.double() - wanted_lse).abs() <= off)[~wanted_lse.isinf()].all())
    # a score that is off by d changes a weight by exp(2 d), its sum's share included
    allowed = (HALF_STEP + torch.expm1(2 * off).nan_to_num(posinf=0.0)[..., None]) * 1.01 * wanted + tiny
    assert bool(((o.double() - wanted).abs() <= allowed).all())


def test_the_reference_rounds_probabilities_of_e4m3_alone():
    tensors = problem(40, 60, 32)
    wanted = exact(*tensors)[0]
    rounded = reference(*tensors, out_dtype=torch.float32)
    plain = reference(*(t.float() for t in tensors), out_dtype=torch.float32)
    assert (plain.double() - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (rounded.double() - wanted).abs().max() > 1e-3 * wanted.abs().max()
    wide = reference(*(t.double() for t in tensors))
    assert wide.dtype == torch.float64
    assert (wide - wanted).abs().max() < 1e-12


def test_long_problems_are_cut_into_rows(monkeypatch):
    tensors = problem(40, 60, 32, blocks="qkv")
    whole = reference(*tensors, causal=True, return_lse=True)
    module = import_module("tilewright.ops.attention.fmha_fp8.reference")  # the package has a function of that name
    monkeypatch.setattr(module, "_BLOCK", 4 * 2 * 60 * 7)
    parts = reference(*tensors, causal=True, return_lse=True)
    for a, b in zip(whole, parts, strict=True):
        assert (a.double() - b.double()).abs().nan_to_num(0.0).max() <= 2.0**-6  # sums of another order, one rounding


@on_every_place
def test_a_window_is_a_mask(place):
    tensors = problem(90, 90, 32, device=place.device)
    for sides, mask in (((20, 0), masks.window(20)), ((-1, 7), masks.window(None, 7)), ((-1, -1), None)):
        by_window = run(ops.fmha_fp8, *tensors, place=place, window=sides)
        assert torch.equal(by_window, run(ops.fmha_fp8, *tensors, place=place, mask=mask))
    both = run(ops.fmha_fp8, *tensors, place=place, window=(20, 5), causal=True)
    assert torch.equal(both, run(ops.fmha_fp8, *tensors, place=place, mask=masks.window(20)))


@pytest.mark.interp
def test_every_road_of_the_kernel_gives_the_same_bits():
    """Pointers, descriptors, and values transposed beforehand, over the same tiles; room beside the result stays."""
    from tilewright.ops.attention.fmha_fp8.args import Options, raw_arguments
    from tilewright.ops.attention.kernels.triton.fp8 import Config, launch

    tensors = problem(133, 141, 64, blocks="v")
    tensors[2] = tensors[2].new_zeros(2, 2, 141, 32).copy_(torch.randn(2, 2, 141, 32))  # rows of 32 bytes: aligned
    args = raw_arguments(*tensors, Options(True, None, None, None, None, None, torch.bfloat16))
    found = []
    for roads in ((False, False), (True, False), (True, True)):
        around = torch.full((2, 135, 4, 40), -77.0, dtype=torch.bfloat16)
        o = around[:, :133, :, :32].transpose(1, 2)
        lse = torch.full((2, 4, 133), torch.nan)
        launch((o, lse), args, Config(64, 64, 4, 2, *roads))
        found.append((o.clone(), lse))
        o.fill_(-77.0)
        assert bool((around == -77.0).all()), "written beside the result"
    for o, lse in found[1:]:
        assert torch.equal(o, found[0][0])
        assert torch.equal(lse, found[0][1])


@pytest.mark.interp
@pytest.mark.parametrize(("s", "d"), [(1, 32), (16, 16), (128, 64), (150, 80), (257, 128)])
def test_values_are_transposed(s, d):
    from tilewright.ops.attention.kernels.triton.transpose import transposed

    v = torch.randint(1, 256, (2, s, 3, d), dtype=torch.uint8).transpose(1, 2)
    made = transposed(v.view(E4M3))
    assert made.shape == (2, 3, d, s)
    assert made.stride(2) % 16 == 0
    assert torch.equal(made.view(torch.uint8), v.mT)

    # Thread c of a wgmma holds scores of keys 2 c, 2 c + 1, 8 + 2 c and 9 + 2 c of 16; A of e4m3 wants 4 c to 4 c + 3
    whole = transposed(v.view(E4M3), fragments=True).view(torch.uint8)
    assert whole.shape == (2, 3, d, -(-s // 16) * 16)
    order = torch.tensor([key for c in range(4) for key in (2 * c, 2 * c + 1, 8 + 2 * c, 9 + 2 * c)])
    keys = (torch.arange(0, whole.shape[3], 16)[:, None] + order).flatten()
    assert torch.equal(whole[..., keys < s], v.mT[..., keys[keys < s]])
    assert bool((whole[..., keys >= s] == 0).all())


def test_tiles_lie_in_one_block_of_scales():
    from tilewright.ops.attention.fmha_fp8.args import FmhaFp8Bucket
    from tilewright.ops.attention.kernels.triton.fp8 import CONFIGS, candidates

    buckets = [FmhaFp8Bucket(32, 1, 8192, 8192, d, d, 0, 0, a, 0) for d in (64, 128, 256) for a in (0, 1)]
    found = {config for bucket in buckets for config in candidates(bucket, E4M3)}
    assert found
    for config in (*CONFIGS, *found):
        assert SCALE_BLOCK % config.block_m == 0
        assert SCALE_BLOCK % config.block_n == 0


def test_scales_are_taken_as_their_shape_says():
    q, k, v, *scales = problem(200, 200, 64)
    spread = [t[..., None].repeat(1, 1, 2) for t in scales]
    assert torch.equal(ops.fmha_fp8(q, k, v, *scales), ops.fmha_fp8(q, k, v, *spread))
    assert explain("fmha_fp8", q, k, v, *scales).bucket.endswith("blocks=0")
    assert explain("fmha_fp8", q, k, v, *spread).bucket.endswith("blocks=7")
    assert explain("fmha_fp8", q, k, v, scales[0], spread[1], scales[2]).bucket.endswith("blocks=2")


def test_there_is_no_gradient():
    q, k, v, q_scale, k_scale, v_scale = problem(8, 8, 32)
    sinks = torch.zeros(4, requires_grad=True)
    with pytest.raises(InputError, match="which has none"):
        ops.fmha_fp8(q, k, v, q_scale, k_scale, v_scale, sinks=sinks)
    with torch.no_grad():
        assert ops.fmha_fp8(q, k, v, q_scale, k_scale, v_scale, sinks=sinks).shape == (2, 4, 8, 16)


def test_cost_counts_bytes_of_float8():
    tensors = problem(64, 64, 128)
    tensors[2] = torch.zeros(2, 2, 64, 128).to(E4M3)
    subject = contract("fmha_fp8")

    made = subject.cost(Sample(tuple(tensors), {"causal": True}), "fwd")
    assert made.flops == 2 * (2 * 4 * 64 * 65 // 2) * 256
    assert made.bytes_read == 2 * 64 * 128 * (4 + 2 + 2) + 4 * 2 * (4 + 2 + 2)
    assert made.bytes_written == 2 * 4 * 64 * (2 * 128 + 4)
    windowed = subject.cost(Sample(tuple(tensors), {"window": (0, 0)}), "fwd")
    assert windowed.flops == 2 * (2 * 4 * 64) * 256
