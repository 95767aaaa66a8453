"""One token drawn from each row of logits."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Contract, RawOp, call, dispatch, register
from tilewright.dispatch.targets import several
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.sampling import checks, sample_cases, sample_reference
from tilewright.ops.sampling.checks import split

LOGPROBS = (None, "sampled", "model")


class SampleArgs(NamedTuple):
    """A parameter is a tensor, or else the number of the same name."""

    logits: Tensor  # (B, V)
    seeds: Tensor  # (B,) int64
    positions: Tensor  # (B,) int64
    temperatures: Tensor | None  # (B,) float32
    top_ks: Tensor | None  # (B,) int32
    top_ps: Tensor | None  # (B,) float32
    min_ps: Tensor | None  # (B,) float32
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logprobs: int  # index in LOGPROBS


class SampleBucket(NamedTuple):
    M: int  # rounded up to a power of two
    N: int
    filters: int  # 1: top-k, 2: top-p


@dispatch("sample")
def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor | float | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    logprobs: str | None = None,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Draw a token from softmax(logits / temperature), of those that top-k, then top-p, then min-p leave.

    logits: (B, V) bf16|fp16|fp32, V <= 2^22; the last stride is 1, another costs a copy.   Returns tokens (B,) int64.
    seeds, positions: (B,) int64.  A row's token depends on its logits, parameters, seed and position alone, not on the
    batch, the GPU or the backend, and repeats bit for bit.  Use one seed a request and the position of the new token.
    Each parameter is one number, or a tensor with one for each row, which is read on the device: there is no
    synchronisation, and one CUDA graph serves all values.

    temperature  (B,) float32, default 1.  0 (or less, or NaN) takes the likeliest token, the first of equals.
    top_k        (B,) int32.  Keeps the k largest logits and all that equal the k-th.  0 or k >= V keeps all.
    top_p        (B,) float32.  Of what top-k leaves, renormalised: keeps a token if the probability of all with larger
                 logits is below top_p, so equal logits stay or go together; the likeliest always stays.  1 keeps all.
    min_p        (B,) float32.  Keeps probabilities of at least min_p times the largest.
    logprobs     also return log-probabilities (B,) float32 of the drawn tokens: "sampled", in the distribution that was
                 drawn from; "model", in softmax(logits).  With the latter those of the n likeliest follow:
                 values, indices = top_k(logits, n); logprobs[:, None] + values - logits.gather(1, tokens[:, None]).
    out          contiguous memory for the tokens, or for (tokens, log-probabilities), to write instead of allocating.
    backend      run on exactly this backend ("cuda", "triton", "torch") or raise BackendError.

    Exact, by integers (`ops/sampling/numbers.py`): probabilities are multiples of 2^-40 of the largest, tokens below
    that are never drawn; top_p is rounded down to a multiple of 2^-24.  NaN counts as -inf, +inf as the largest number.
    A row without a logit above -inf gives token -1 and logprob -inf.  There is no gradient.
    Raises InputError for other dtypes and shapes, and for logits that require a gradient.
    Source: order of the filters as in Transformers; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    if logprobs not in LOGPROBS:
        raise InputError(f"sample: logprobs is {logprobs!r}; allowed are None, 'sampled' and 'model'.")
    args = raw_arguments(logits, seeds, positions, temperature, top_k, top_p, min_p, LOGPROBS.index(logprobs))
    tokens, values = call(CONTRACT, args, backend, several(out, 1 if logprobs is None else 2, 2))
    if out is not None:
        return out
    return tokens if logprobs is None else (tokens, values)


def raw_arguments(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor | float | None,
    top_k: Tensor | int | None,
    top_p: Tensor | float | None,
    min_p: Tensor | float | None,
    logprobs: int,
) -> SampleArgs:
    """The arguments of the raw op: parameters divided into tensors and numbers."""
    pairs = split(temperature, 1.0), split(top_k, 0), split(top_p, 1.0), split(min_p, 0.0)
    tensors, numbers = zip(*pairs, strict=True)
    return SampleArgs(logits, seeds, positions, *tensors, *numbers, logprobs)


def reference(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor | float | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    logprobs: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Plain torch, with sorts; the same tokens."""
    mode = LOGPROBS.index(logprobs)
    args = raw_arguments(logits, seeds, positions, temperature, top_k, top_p, min_p, mode)
    tokens, values = sample_reference.draw_tokens(args)
    return tokens if logprobs is None else (tokens, values)


def filters(args: SampleArgs) -> int:
    """Which searches a call may need: 1 top-k, 2 top-p."""
    top_k = args.top_ks is not None or args.top_k > 0
    return int(top_k) + 2 * int(args.top_ps is not None or args.top_p < 1)


FORWARD = RawOp(
    "sample",
    "fwd",
    SampleArgs,
    package="tilewright.ops.sampling",
    kernels=("sm90.sample", "triton.sample"),
    outputs=lambda args: (
        ((args.logits.shape[0],), torch.int64),
        ((args.logits.shape[0] if args.logprobs else 0,), torch.float32),
    ),
    reference=sample_reference.draw_tokens,
    bucket=lambda args: SampleBucket(*rows.rows_bucket(args.logits), filters(args)),
    bucket_names=SampleBucket._fields,
    count=2,
    out=True,
)


def check(args: SampleArgs) -> None:
    """Raise InputError for what the docstring of `sample` excludes."""
    checks.check_rows("sample", "logits", args.logits)
    batch, device = (args.logits.shape[0],), args.logits.device
    checks.check_like("sample", "seeds", args.seeds, batch, torch.int64, device)
    checks.check_like("sample", "positions", args.positions, batch, torch.int64, device)
    for name, tensor, dtype in (
        ("temperature", args.temperatures, torch.float32),
        ("top_k", args.top_ks, torch.int32),
        ("top_p", args.top_ps, torch.float32),
        ("min_p", args.min_ps, torch.float32),
    ):
        if tensor is not None:
            checks.check_like("sample", name, tensor, batch, dtype, device)
    for name, value, allowed, fits in (
        ("temperature", args.temperature, "at least 0", args.temperature >= 0),
        ("top_k", args.top_k, "at least 0", 0 <= args.top_k < 1 << 31),
        ("top_p", args.top_p, "above 0, up to 1", 0 < args.top_p <= 1),
        ("min_p", args.min_p, "0 to 1", 0 <= args.min_p <= 1),
    ):
        if not fits:
            raise InputError(f"sample: {name} is {value}; needs a number {allowed}.")


CONTRACT = register(
    Contract(
        name="sample",
        family="sampling",
        summary="a token drawn from each row of logits: temperature, top-k, top-p, min-p",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=sample_cases.inputs,
        cost=sample_cases.cost,
        workloads=sample_cases.WORKLOADS,
        cpu_workloads=sample_cases.CPU_WORKLOADS,
        edge_cases=sample_cases.EDGE_CASES,
        bad_inputs=sample_cases.BAD_INPUTS,
        batch_dim=None,  # rows are independent, but `validate` takes vectors of numbers for weights, not parameters
    )
)
