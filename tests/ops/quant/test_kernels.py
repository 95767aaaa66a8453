"""The Triton kernels give the reference's bits, in every configuration, and on GPUs without e4m3."""

from importlib import import_module

import pytest
import torch

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import contract, implementations
from tilewright.dispatch.registry import listed_kernels
from tilewright.ops.quant.dequantize import DequantizeArgs, dequantize
from tilewright.ops.quant.per_token_cast_to_fp8 import PerTokenCastArgs

pytest.importorskip("triton")

from tilewright.ops.quant.kernels.triton import dequantize as dequantize_kernel
from tilewright.ops.quant.kernels.triton import per_token_cast

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
CASTS = ("per_token_cast_to_fp8", "per_channel_cast_to_fp8", "per_block_cast_to_fp8", "per_tensor_cast_to_fp8")
OPS = (*CASTS, "dequantize")


def kernels_of(name):
    op = contract(name).forward
    return implementations(op.op, op.direction)["triton"]


def module_of(name):
    """Its kernel's module, where a test replaces a function."""
    (path,) = listed_kernels(name)["triton"]
    return import_module(path)


def assert_same_bits(made, expected, what):
    """NaN may have another sign."""
    for ours, theirs in zip(made, expected, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype), what
        ours, theirs = ours.contiguous(), theirs.contiguous()
        if not ours.is_floating_point():
            assert torch.equal(ours, theirs), what
            continue
        number = ~theirs.float().isnan()
        assert torch.equal(~ours.float().isnan(), number), what
        word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
        assert torch.equal(ours.view(word)[number], theirs.view(word)[number]), what


def expected_of(subject, sample):
    made = subject.reference(*sample.args, **sample.kwargs)
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", OPS)
def test_every_edge_case_bit_for_bit(name, dtype, seed):
    """In the interpreter the contract's promise of the reference's bits is tested for every op that makes it."""
    subject = contract(name)
    for case in subject.edge_cases:
        sample = subject.inputs(case.params, dtype, torch.device("cuda"), seed)
        made = subject.function(*sample.args, **sample.kwargs, backend="triton")
        assert_same_bits(made if isinstance(made, tuple) else (made,), expected_of(subject, sample), case.name)


def launch(kernels, subject, sample, config, device):
    """The kernel itself, into outputs that are poisoned."""
    raw = raw_args(subject, sample)
    outs = subject.forward.allocate(raw, device)
    for out in outs:
        out.fill_(torch.nan if out.is_floating_point() else 77)
    kernels.launch(outs, *raw, config=config or kernels.configure(subject.forward.bucket_of(raw, "default"), None))
    return outs


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("device", DEVICES)
def test_gpus_without_e4m3_convert_by_integers(device, name, seed, monkeypatch):
    kernels, subject = kernels_of(name), contract(name)
    monkeypatch.setattr(module_of(name), "as_stored", lambda q: q.view(torch.uint8))
    monkeypatch.setattr(module_of(name), "has_ptx_e4m3", lambda q: False, raising=False)
    for case in subject.edge_cases[:: 1 if device == "cuda" else 3]:
        sample = subject.inputs(case.params, torch.bfloat16, torch.device(device), seed)
        if sample.args[0].numel():
            assert_same_bits(launch(kernels, subject, sample, None, device), expected_of(subject, sample), case.name)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_candidate(device, name, seed):
    kernels, subject = kernels_of(name), contract(name)
    for case in subject.edge_cases[: 4 if device == "cuda" else 2]:
        sample = subject.inputs(case.params, torch.bfloat16, torch.device(device), seed)
        expected = expected_of(subject, sample)
        space = kernels.candidates(subject.forward.bucket_of(raw_args(subject, sample), "default"), torch.bfloat16)
        assert space
        for config in space[:: 1 if device == "cuda" else 5]:
            assert_same_bits(launch(kernels, subject, sample, config, device), expected, f"{case.name}, {config}")


def raw_args(subject, sample):
    from tilewright.dispatch import record

    with record() as notes:
        subject.function(*sample.args, **sample.kwargs, backend="torch")
    return notes.calls[0][1]


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_apart_are_read_where_they_are(device, name):
    """Gaps hold NaN, which any amax would show; an odd start allows no vector loads."""
    subject = contract(name)
    wide = torch.full((140, 300), torch.nan, device=device)
    x = wide[3:133, 7:267].normal_()
    made = subject.function(x, backend="triton")
    assert_same_bits(made, subject.reference(x), name)


@pytest.mark.parametrize("by_integers", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_every_number_of_e4m3_and_what_rounds_to_it(device, by_integers, monkeypatch):
    """With a scale of 1: all 256 codes, and the float32 at, beside and halfway between them."""
    if by_integers:
        for kernels in (dequantize_kernel, per_token_cast):
            monkeypatch.setattr(kernels, "as_stored", lambda q: q.view(torch.uint8))
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(1, 256).view(torch.float8_e4m3fn)
    wide = torch.empty(1, 256, device=device)
    one = torch.ones(1, 1, device=device)
    config = dequantize_kernel.Config(rows=1, groups=2, num_warps=1, vector=8)
    dequantize_kernel.launch((wide,), DequantizeArgs(codes, one, torch.float32), config)
    assert_same_bits((wide,), (codes.float(),), "decode")

    known = codes.float()[0, :127]  # the positive numbers; then NaN
    halves = (known[:-1] + known[1:]) / 2
    beside = [halves, halves.nextafter(known[1:]), halves.nextafter(known[:-1]), known, known * 1e-3]
    x = torch.zeros(10, 128, device=device)
    for i, row in enumerate((*beside, *(-values for values in beside))):
        x[i, : len(row)] = row
    x[:, 127] = 448.0
    args = PerTokenCastArgs(x, 128, False, False)
    q, scales = contract("per_token_cast_to_fp8").forward.allocate(args, device)
    per_token_cast.launch((q, scales), args, per_token_cast.Config(4, 1, 1))
    assert (scales == 1).all()
    assert_same_bits((q,), (x.to(torch.float8_e4m3fn),), "encode")


BATCHES = {
    "dense": lambda s: s,
    "other order": lambda s: s.transpose(0, 1).contiguous().transpose(0, 1),
    "one for all outer": lambda s: s[:1].expand_as(s),
    "one for all inner": lambda s: s[:, :1].expand_as(s),
    "cut out": lambda s: torch.cat((s, s + 1), 1)[:, : s.shape[1]],
    "cut out of lines": lambda s: torch.cat((s.mT, s.mT + 1), -1)[..., : s.shape[-2]].mT,
}


@pytest.mark.parametrize("device", ["cpu-torch", *DEVICES])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", [(40, 2), (1, 2), (1, 256), (40, 1), (1, 1)], ids=str)
def test_scales_of_a_batch_lie_anywhere(shape, batch, device):
    """Two dimensions of a batch, which no one stride leads through."""
    device, _, backend = device.partition("-")
    q = torch.randn(2, 3, 40, 256).to(device, torch.float8_e4m3fn)
    scales = BATCHES[batch](torch.rand(2, 3, *shape, device=device) + 0.5)
    every = scales.repeat_interleave(40 // shape[0], -2).repeat_interleave(256 // shape[1], -1)
    made = dequantize(q, scales, dtype=torch.float32, backend=backend or "triton")
    assert torch.equal(made, q.float() * every)
