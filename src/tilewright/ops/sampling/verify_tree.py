"""Speculative decoding: the path of a tree of drafted tokens that the target takes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.dispatch.targets import several
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.sampling import checks

MOST_NODES = 4096


class VerifyTreeArgs(NamedTuple):
    target_tokens: Tensor  # (B, nodes) int64
    draft_tokens: Tensor  # (B, nodes) int64
    parents: Tensor  # (B, nodes) int32


class VerifyTreeBucket(NamedTuple):
    M: int  # rounded up to a power of two
    nodes: int


@dispatch("verify_tree")
def verify_tree(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    parents: Tensor,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, nodes, accepted): from the root, follow the child that drafted the target's token, while there is one.

    The target draws one token at every node (`sample` on its logits there, with the node's depth in the position).  The
    path takes them in turn, so its tokens are the target's own, exactly, however the tree was drafted.  Drafts count as
    certain: their probabilities, which would accept a little more often, are not used (`verify_chain` does).
    target_tokens: (B, N) int64, the draw after each node.   draft_tokens: (B, N) int64; that of the root is not read.
    parents: (B, N) int32: node 0 is the root, and 0 <= parents[b, i] < i; other values mean no node, for padding.  Of
    children with equal tokens the first is followed.   N <= 4096.
    Returns tokens (B, N) int64: the accepted drafts and the target's token after them, then -1; nodes (B, N) int32: the
    node at which each was drawn, the root first, then -1 (all but the last token of the path lie in the KV cache at
    nodes[:, 1:]); accepted (B,) int32, 0 to N - 1.   out: the three, contiguous memory to write instead of allocating.
    There is no gradient.   backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other dtypes and shapes.
    Source: Miao et al., "SpecInfer", 2024.
    """
    args = VerifyTreeArgs(target_tokens, draft_tokens, parents)
    result: tuple[Tensor, Tensor, Tensor] = call(CONTRACT, args, backend, several(out, 3, 3))
    return result if out is None else out


def reference(target_tokens: Tensor, draft_tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Plain torch: N steps from node to child."""
    b, n = target_tokens.shape
    places = torch.arange(n, device=target_tokens.device)
    node = torch.zeros(b, 1, dtype=torch.int64, device=target_tokens.device)
    goes_on = torch.ones_like(node, dtype=torch.bool)
    path = []
    for _ in range(n):
        path.append(torch.where(goes_on, node, -1))
        token = target_tokens.gather(1, node)
        child = (parents == node) & (places > node) & (draft_tokens == token)
        goes_on = goes_on & child.any(1, keepdim=True)
        node = torch.where(goes_on, torch.where(child, places, n - 1).amin(1, keepdim=True), node)
    nodes = torch.cat(path, 1)
    tokens = torch.where(nodes >= 0, target_tokens.gather(1, nodes.clamp(min=0)), -1)
    return tokens, nodes.to(torch.int32), ((nodes >= 0).sum(1) - 1).to(torch.int32)


FORWARD = RawOp(
    "verify_tree",
    "fwd",
    VerifyTreeArgs,
    package="tilewright.ops.sampling",
    kernels=("triton.verify_tree",),
    outputs=lambda args: (
        (args.target_tokens.shape, torch.int64),
        (args.target_tokens.shape, torch.int32),
        (args.target_tokens.shape[:1], torch.int32),
    ),
    reference=lambda args: reference(*args),
    bucket=lambda args: VerifyTreeBucket(row_bucket(args.target_tokens.shape[0]), hint(args.target_tokens.shape[1])),
    bucket_names=VerifyTreeBucket._fields,
    count=3,
    out=True,
    dtypes=(torch.int64,),
)


def check(args: VerifyTreeArgs) -> None:
    """Raise InputError for what the docstring of `verify_tree` excludes."""
    tokens = args.target_tokens
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.dim() != 2:
        got = f"{tuple(tokens.shape)} {tokens.dtype}" if isinstance(tokens, Tensor) else f"a {type(tokens).__name__}"
        raise InputError(f"verify_tree: target_tokens is {got}; needs (B, N) torch.int64.")
    if not 1 <= tokens.shape[1] <= MOST_NODES:
        raise InputError(f"verify_tree: target_tokens is {tuple(tokens.shape)}; N may be 1 to {MOST_NODES}.")
    shape = tuple(tokens.shape)
    checks.check_like("verify_tree", "draft_tokens", args.draft_tokens, shape, torch.int64, tokens.device)
    checks.check_like("verify_tree", "parents", args.parents, shape, torch.int32, tokens.device)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M trees, nodes a tree, tokens (of so many kinds, default 3); padded (nodes at the end without a parent);
    path (a chain of which all is accepted).
    """
    m, n, kinds, g = params["M"], params["nodes"], params.get("tokens", 3), rows.generator(seed)
    parents = (torch.rand((m, n), generator=g) * torch.arange(n)).to(torch.int32)
    parents[:, :1] = -1
    drafts, targets = (torch.randint(0, kinds, (m, n), generator=g) for _ in range(2))
    if params.get("path"):
        parents = (torch.arange(n, dtype=torch.int32) - 1).repeat(m, 1)
        drafts = torch.cat((drafts[:, :1], targets[:, :-1]), 1)
    if params.get("padded"):
        parents[:, n // 2 :] = -1
    return Sample((targets.to(device), drafts.to(device), parents.to(device)))


def cost(sample: Sample, direction: str) -> Cost:
    """A comparison a node and step of the path; reads three tables, writes two and a number."""
    tokens = sample.args[0]
    return Cost(tokens.numel(), rows.nbytes(*sample.args), 12 * tokens.numel() + 4 * tokens.shape[0])


def _case(name: str, m: int, nodes: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "nodes": nodes, **options}, (torch.int64,), ("fwd",))


def _bad(name: str, match: str, position: int, tensor: Tensor) -> BadInput:
    def make(device: torch.device) -> Sample:
        args = [torch.zeros(2, 4, dtype=dtype, device=device) for dtype in (torch.int64, torch.int64, torch.int32)]
        args[position] = tensor.to(device)
        return Sample(tuple(args))

    return BadInput(name, make, match)


CONTRACT = register(
    Contract(
        name="verify_tree",
        family="sampling",
        summary="the path of a tree of drafted tokens that the target takes",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        workloads=(_case("eagle_1x64", 1, 64), _case("eagle_64x64", 64, 64)),
        cpu_workloads=(_case("small", 16, 64),),
        edge_cases=(
            _case("root: a tree without drafts", 3, 1),
            _case("tree: some of each path", 9, 31),
            _case("equal: children with one token", 6, 20, tokens=1),
            _case("path: all is accepted", 3, 17, path=True),
            _case("padded: nodes without a parent", 4, 12, padded=True, tokens=2),
            _case("empty: no trees", 0, 8),
        ),
        bad_inputs=(
            _bad("tokens of 32 bits", "target_tokens is .* torch.int32", 0, torch.zeros(2, 4, dtype=torch.int32)),
            _bad("other drafts", r"draft_tokens is \(2, 3\)", 1, torch.zeros(2, 3, dtype=torch.int64)),
            _bad("parents of 64 bits", "parents is .* torch.int64", 2, torch.zeros(2, 4, dtype=torch.int64)),
            _bad("no root", "N may be 1 to", 0, torch.zeros(2, 0, dtype=torch.int64)),
        ),
        dtypes=(torch.int64,),
    )
)
