"""Speculative decoding: how many drafted tokens of a chain the target accepts, and the token after them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops import rows
from tilewright.ops.sampling import checks, numbers


class VerifyChainArgs(NamedTuple):
    target_probs: Tensor  # (B, n + 1, V)
    draft_tokens: Tensor  # (B, n) int64
    seeds: Tensor  # (B,) int64
    positions: Tensor  # (B,) int64
    draft_probs: Tensor | None  # (B, n, V)


class VerifyChainBucket(NamedTuple):
    M: int  # rounded up to a power of two
    N: int
    drafts: int


@dispatch("verify_chain")
def verify_chain(
    target_probs: Tensor,
    draft_tokens: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    draft_probs: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(tokens, accepted): drafted tokens up to the first rejected one, then one of the target; each is distributed as
    if the target had drawn it.

    Draft i is accepted with probability min(1, p_i / q_i), p and q its probabilities in target and draft.  In place of
    the first rejected one comes a token of max(p - q, 0), renormalised; after n accepted ones a token of p_n.
    target_probs: (B, n + 1, V) fp32, those after 0 to n drafts, filtered as the target samples; V <= 2^22.
    draft_tokens: (B, n) int64.  One outside of 0..V-1 ends the chain: in its place comes a token of p.
    seeds, positions: (B,) int64 as for `sample`; position of the first drafted token.  Results do not depend on the
    batch or the backend, and repeat bit for bit.   draft_probs: (B, n, V) fp32, the distributions from which the
    drafts were drawn; None: drafts are certain (greedy, n-grams), q = 1.
    Returns tokens (B, n + 1) int64, -1 after the last one, and accepted (B,) int32, 0 to n.
    Probabilities are rounded down to multiples of 2^-40, NaN and negative ones to 0; from there all is exact.  Where
    nothing is left of max(p - q, 0), as where p does not sum to 1, the token is one of p; -1 if p is 0 too.
    There is no gradient.   backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other dtypes and shapes, and for probabilities that require a gradient.
    Source: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023.
    """
    args = VerifyChainArgs(target_probs, draft_tokens, seeds, positions, draft_probs)
    result: tuple[Tensor, Tensor] = call(CONTRACT, args, backend)
    return result


def reference(
    target_probs: Tensor,
    draft_tokens: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    draft_probs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain torch, the same tokens."""
    return _verified(VerifyChainArgs(target_probs, draft_tokens, seeds, positions, draft_probs))


def fixed(probabilities: Tensor) -> Tensor:
    """Probabilities as multiples of 2^-40."""
    p = probabilities.to(torch.float32)
    return (torch.where(p > 0, p, 0.0).clamp(max=1.0) * 2.0**numbers.UNIT).to(torch.int64)


def _verified(args: VerifyChainArgs) -> tuple[Tensor, Tensor]:
    (b, steps, vocabulary), drafts, device = args.target_probs.shape, args.draft_tokens, args.target_probs.device
    n, p = steps - 1, fixed(args.target_probs)
    inside = (drafts >= 0) & (drafts < vocabulary)
    place = torch.where(inside, drafts, 0)[..., None]
    if args.draft_probs is None:
        q = torch.zeros_like(p[:, :n]).scatter(2, place, 1 << numbers.UNIT)
    else:
        q = fixed(args.draft_probs)
    q = torch.where(inside[..., None], q, 0)
    offsets = torch.arange(steps, device=device)
    random = numbers.philox(args.seeds[:, None], args.positions[:, None] + offsets[:n], numbers.ACCEPT)
    threshold = numbers.below(random, q.gather(2, place)[..., 0])
    accepts = inside & (threshold < p[:, :n].gather(2, place)[..., 0])
    accepted = accepts.to(torch.int32).cumprod(1).sum(1)

    index = accepted[:, None, None].expand(b, 1, vocabulary)
    p_last = p.gather(1, index)[:, 0]
    q_last = torch.cat((q, torch.zeros_like(p[:, :1])), 1).gather(1, index)[:, 0]
    w = (p_last - q_last).clamp(min=0)
    w = torch.where(w.sum(1, keepdim=True) > 0, w, p_last)
    u = numbers.below(numbers.philox(args.seeds, args.positions + accepted, numbers.RESIDUAL), w.sum(1))
    last = numbers.draw(w, u)
    padded = torch.cat((drafts, torch.full_like(last[:, None], -1)), 1)
    last_place = accepted[:, None]
    tokens = torch.where(offsets < last_place, padded, torch.where(offsets == last_place, last[:, None], -1))
    return tokens, accepted.to(torch.int32)


FORWARD = RawOp(
    "verify_chain",
    "fwd",
    VerifyChainArgs,
    package="tilewright.ops.sampling",
    kernels=("triton.verify_chain",),
    outputs=lambda args: ((args.target_probs.shape[:2], torch.int64), (args.target_probs.shape[:1], torch.int32)),
    reference=_verified,
    bucket=lambda args: VerifyChainBucket(
        row_bucket(args.target_probs.shape[0]), hint(args.target_probs.shape[2]), hint(args.target_probs.shape[1])
    ),
    bucket_names=VerifyChainBucket._fields,
    count=2,
    dtypes=(torch.float32,),
)


def check(args: VerifyChainArgs) -> None:
    """Raise InputError for what the docstring of `verify_chain` excludes."""
    op = "verify_chain"
    checks.check_rows(op, "target_probs", args.target_probs, "(B, n + 1, V)", dtypes=(torch.float32,))
    b, steps, vocabulary = args.target_probs.shape
    device = args.target_probs.device
    checks.check_like(op, "draft_tokens", args.draft_tokens, (b, steps - 1), torch.int64, device)
    checks.check_like(op, "seeds", args.seeds, (b,), torch.int64, device)
    checks.check_like(op, "positions", args.positions, (b,), torch.int64, device)
    if args.draft_probs is not None:
        shape = (b, steps - 1, vocabulary)
        checks.check_like(op, "draft_probs", args.draft_probs, shape, torch.float32, device)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M requests, N tokens, drafts a request; near (how much the draft's logits differ, default 1); certain (no
    draft_probs); ended (some chains end early).
    """
    m, n, drafts = params["M"], params["N"], params["drafts"]
    g = rows.generator(seed)
    logits = rows.random_tensor((m, drafts + 1, n), torch.float32, device, g, 2.0)
    other = rows.random_tensor((m, drafts, n), torch.float32, device, g, params.get("near", 1.0))
    target, draft = logits.softmax(-1), (logits[:, :drafts] + other).softmax(-1)
    scores = draft / torch.rand((m, drafts, 1), generator=g).to(device)
    tokens = scores.argmax(-1) if n else torch.zeros((m, drafts), dtype=torch.int64, device=device)
    if params.get("ended"):
        tokens[1::2, drafts // 2 :] = -1
    kwargs = {} if params.get("certain") else {"draft_probs": draft}
    return Sample((target, tokens, *checks.seeds(m, device, seed)), kwargs)


def cost(sample: Sample, direction: str) -> Cost:
    """Reads one row of p and of q, of all that were drafted: that of the last token."""
    p = sample.args[0]
    b, steps, vocabulary = p.shape
    rows_read = 1 if sample.kwargs.get("draft_probs") is None else 2
    return Cost(4 * b * vocabulary, 4 * rows_read * b * vocabulary, 8 * b * steps + 4 * b)


def _case(name: str, m: int, n: int, drafts: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, "drafts": drafts, **options}, (torch.float32,), ("fwd",))


def _bad(name: str, match: str, **changes: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        long = torch.ones(2, dtype=torch.int64, device=device)
        args = {
            "target_probs": torch.ones(2, 4, 8, device=device),
            "draft_tokens": torch.ones(2, 3, dtype=torch.int64, device=device),
            "seeds": long,
            "positions": long,
            "draft_probs": torch.ones(2, 3, 8, device=device),
        }
        args |= {key: change(args[key]) for key, change in changes.items()}
        return Sample(tuple(args.values())[:4], {"draft_probs": args["draft_probs"]})

    return BadInput(name, make, match)


CONTRACT = register(
    Contract(
        name="verify_chain",
        family="sampling",
        summary="exact acceptance of a chain of drafted tokens, and the token after them",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        workloads=tuple(_case(f"drafts_{m}x{n}x{d}", m, n, d) for m, n, d in ((1, 131072, 4), (32, 131072, 4))),
        cpu_workloads=(_case("small", 4, 32000, 4),),
        edge_cases=(
            _case("one: a single draft", 3, 100, 1),
            _case("none: no draft, a draw of the target", 4, 333, 0),
            _case("chain: some of five", 9, 200, 5, near=0.3),
            _case("certain: drafts without probabilities", 9, 50, 3, certain=True),
            _case("ended: chains of several lengths", 6, 64, 4, ended=True, near=0.1),
            _case("n_1: one token", 3, 1, 2),
            _case("parts: a row divided among programs", 2, 9001, 2),
            _case("empty: no requests", 0, 64, 2),
        ),
        bad_inputs=(
            _bad("half precision", "target_probs is torch.bfloat16", target_probs=lambda x: x.bfloat16()),
            _bad("a matrix", r"needs \(B, n \+ 1, V\)", target_probs=lambda x: x[0]),
            _bad("no tokens", "may be 1 to", target_probs=lambda x: x[..., :0], draft_probs=lambda x: x[..., :0]),
            _bad("a draft too many", r"draft_tokens is \(2, 4\)", draft_tokens=lambda x: x.new_ones(2, 4)),
            _bad("tokens of 32 bits", "draft_tokens is .* torch.int32", draft_tokens=lambda x: x.int()),
            _bad("another vocabulary", r"draft_probs is \(2, 3, 7\)", draft_probs=lambda x: x[..., :7]),
        ),
        dtypes=(torch.float32,),
    )
)
