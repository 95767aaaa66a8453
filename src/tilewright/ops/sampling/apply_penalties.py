"""Penalties for repeated tokens, and a bias, on the logits of each request."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.sampling import checks
from tilewright.ops.sampling.checks import split


class ApplyPenaltiesArgs(NamedTuple):
    """A penalty is a tensor, or else the number of the same name."""

    logits: Tensor  # (B, V)
    counts: Tensor  # (B, V) int32
    prompt: Tensor | None  # (B, V) bool
    bias: Tensor | None  # (B, V) float32
    repetitions: Tensor | None  # (B,) float32
    presences: Tensor | None  # (B,) float32
    frequencies: Tensor | None  # (B,) float32
    repetition: float
    presence: float
    frequency: float


@dispatch("apply_penalties")
def apply_penalties(
    logits: Tensor,
    counts: Tensor,
    *,
    prompt: Tensor | None = None,
    bias: Tensor | None = None,
    repetition: Tensor | float | None = None,
    presence: Tensor | float | None = None,
    frequency: Tensor | float | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = r(x) - frequency * count - presence * (count > 0) + bias, in float32, rounded once; for tokens of the prompt
    or the output r(x) is x / repetition where x > 0 and x * repetition elsewhere, for others it is x.

    logits x: (B, V) bf16|fp16|fp32, V <= 2^22; the last stride is 1, another costs a copy.   y: x's shape and dtype.
    counts: (B, V) int32, how often each token is in the output so far.   prompt: (B, V) bool, is it in the prompt?
    bias: (B, V) float32, added; -inf forbids a token.
    repetition, presence, frequency: one number, or a tensor (B,) float32 read on the device; 1, 0 and 0 by default.

    An op of its own rather than an option of `sample`: `greedy`, `top_k` and a search of thresholds read the result
    several times, and requests without penalties pay nothing.   There is no gradient.
    out: contiguous tensor to write instead of allocating; `logits` itself is allowed.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other dtypes and shapes, a repetition that is not above 0, logits that require a gradient.
    Source: Keskar et al., "CTRL", 2019 (repetition); the two others and their order are those of OpenAI's API and vLLM.
    """
    args = raw_arguments(logits, counts, prompt, bias, repetition, presence, frequency)
    result: Tensor = call(CONTRACT, args, backend, out)
    return result


def raw_arguments(
    logits: Tensor,
    counts: Tensor,
    prompt: Tensor | None,
    bias: Tensor | None,
    repetition: Tensor | float | None,
    presence: Tensor | float | None,
    frequency: Tensor | float | None,
) -> ApplyPenaltiesArgs:
    """The arguments of the raw op: penalties divided into tensors and numbers."""
    pairs = split(repetition, 1.0), split(presence, 0.0), split(frequency, 0.0)
    tensors, numbers = zip(*pairs, strict=True)
    return ApplyPenaltiesArgs(logits, counts, prompt, bias, *tensors, *numbers)


def reference(
    logits: Tensor,
    counts: Tensor,
    *,
    prompt: Tensor | None = None,
    bias: Tensor | None = None,
    repetition: Tensor | float | None = None,
    presence: Tensor | float | None = None,
    frequency: Tensor | float | None = None,
) -> Tensor:
    """Plain torch, in float32."""
    return _penalised(raw_arguments(logits, counts, prompt, bias, repetition, presence, frequency))


def _penalised(args: ApplyPenaltiesArgs) -> Tensor:
    x, counts = args.logits.to(rows.accumulate_dtype(args.logits.dtype)), args.counts
    # A number in a tensor too: on a GPU torch divides by a tensor, but multiplies by the reciprocal of a number
    repetition, presence, frequency = (
        x.new_full((1, 1), number) if tensor is None else tensor.to(x.dtype)[:, None]
        for tensor, number in zip(args[4:7], args[7:], strict=True)
    )
    present = counts > 0 if args.prompt is None else (counts > 0) | args.prompt
    y = torch.where(present, torch.where(x > 0, x / repetition, x * repetition), x)
    y = y - frequency * counts - presence * (counts > 0)
    if args.bias is not None:
        y = y + args.bias.to(x.dtype)
    return y.to(args.logits.dtype)


FORWARD = RawOp(
    "apply_penalties",
    "fwd",
    ApplyPenaltiesArgs,
    package="tilewright.ops.sampling",
    kernels=("triton.apply_penalties",),
    outputs=lambda args: ((args.logits.shape, args.logits.dtype),),
    reference=_penalised,
    bucket=lambda args: rows.rows_bucket(args.logits),
    bucket_names=rows.RowsBucket._fields,
    out=True,
)


def check(args: ApplyPenaltiesArgs) -> None:
    """Raise InputError for what the docstring of `apply_penalties` excludes."""
    op = "apply_penalties"
    checks.check_rows(op, "logits", args.logits)
    shape, device = tuple(args.logits.shape), args.logits.device
    checks.check_like(op, "counts", args.counts, shape, torch.int32, device)
    if args.prompt is not None:
        checks.check_like(op, "prompt", args.prompt, shape, torch.bool, device)
    if args.bias is not None:
        checks.check_like(op, "bias", args.bias, shape, torch.float32, device)
    for name, tensor in zip(("repetition", "presence", "frequency"), args[4:7], strict=True):
        if tensor is not None:
            checks.check_like(op, name, tensor, shape[:1], torch.float32, device)
    if not args.repetition > 0:
        raise InputError(f"{op}: repetition is {args.repetition}; needs a number above 0, 1 for none.")


_PENALTIES = ("repetition", "presence", "frequency")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M rows, N tokens; prompt, bias (True for a tensor); penalties, each a number or "rows", a tensor."""
    m, n, g = params["M"], params["N"], rows.generator(seed + 1)
    counts = (torch.randint(-8, 5, (m, n), generator=g, dtype=torch.int32)).clamp(min=0).to(device)
    kwargs: dict[str, Any] = {}
    if params.get("prompt"):
        kwargs["prompt"] = (torch.rand((m, n), generator=g) < 0.3).to(device)
    if params.get("bias"):
        kwargs["bias"] = rows.random_tensor((m, n), torch.float32, device, g)
    for name in _PENALTIES:
        if params.get(name) == "rows":
            kwargs[name] = (0.5 + torch.rand((m,), generator=g)).to(device)
        elif name in params:
            kwargs[name] = params[name]
    return Sample((checks.logits(m, n, dtype, device, seed), counts), kwargs)


def cost(sample: Sample, direction: str) -> Cost:
    """Some eight operations an element; reads logits, counts and what else there is, writes the result."""
    x = sample.args[0]
    return Cost(8 * x.numel(), rows.nbytes(*sample.args, *sample.kwargs.values()), rows.nbytes(x))


_ALL = {"repetition": "rows", "presence": "rows", "frequency": "rows", "prompt": True}


def _bad(name: str, match: str, **changes: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        x, counts = torch.ones(4, 8, device=device), torch.ones(4, 8, dtype=torch.int32, device=device)
        kwargs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in changes.items()}
        return Sample((kwargs.pop("logits", x), kwargs.pop("counts", counts)), kwargs)

    return BadInput(name, make, match)


CONTRACT = register(
    Contract(
        name="apply_penalties",
        family="sampling",
        summary="repetition, presence and frequency penalties, and a bias, on logits",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        in_place=("logits",),
        workloads=tuple(
            Workload(f"all_{m}x{n}", {"M": m, "N": n, **_ALL}, (torch.bfloat16, torch.float32), ("fwd",))
            for m, n in ((1, 131072), (32, 128256), (128, 131072))
        ),
        cpu_workloads=(Workload("small", {"M": 16, "N": 32000, **_ALL}, (torch.float32,), ("fwd",)),),
        edge_cases=(
            Workload("none: the logits as they are", {"M": 3, "N": 100}),
            Workload("numbers: one for all rows", {"M": 3, "N": 333, "repetition": 1.3, "presence": 0.5}),
            Workload("rows: a tensor of each, with a prompt", {"M": 5, "N": 300, **_ALL}),
            Workload("bias: added last", {"M": 4, "N": 200, "bias": True, "frequency": 0.25}),
            Workload("parts: a row divided among programs", {"M": 2, "N": 9001, **_ALL, "bias": True}),
            Workload("n_1: one token", {"M": 5, "N": 1, "presence": 1.0}),
            Workload("empty: no rows", {"M": 0, "N": 64}),
        ),
        bad_inputs=(
            _bad("integers", "logits is torch.int32", logits=torch.ones(4, 8, dtype=torch.int32)),
            _bad("counts of 64 bits", "counts is .* torch.int64", counts=torch.ones(4, 8, dtype=torch.int64)),
            _bad("a prompt of another length", r"prompt is \(4, 7\)", prompt=torch.ones(4, 7, dtype=torch.bool)),
            _bad("a bias in bf16", "bias is .* torch.bfloat16", bias=torch.ones(4, 8, dtype=torch.bfloat16)),
            _bad("repetition of 0", "repetition is 0.0; needs a number above 0", repetition=0.0),
            _bad("presence by token", r"presence is \(8,\)", presence=torch.ones(8)),
        ),
        batch_dim=None,  # rows are independent, but `validate` takes vectors of numbers for weights, not parameters
    )
)
