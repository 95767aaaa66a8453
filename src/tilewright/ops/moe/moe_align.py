"""The order of tokens by expert: which rows each expert has, and where each token went."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.arguments import Size
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops import rows
from tilewright.ops.moe import assignment


class MoeAlignArgs(NamedTuple):
    topk_ids: Tensor  # (T, k) int32|int64
    expert_map: Tensor | None  # (all experts,) int32
    num_experts: Size


class MoeAlignBucket(NamedTuple):
    S: int  # slots, T * k
    E: int


@dispatch("moe_align")
def moe_align(
    topk_ids: Tensor, num_experts: int, *, expert_map: Tensor | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(slots, positions, starts, ends): a stable sort of the T * k slots of topk_ids by expert, in one launch or two,
    without a wait for the device.

    topk_ids: (T, k) int32|int64, the experts of each token; -1 drops a slot.   expert_map: (all experts,) int32, from
    the ids in topk_ids to experts 0..num_experts-1 of this device, -1 for those of others, which are dropped.
    slots: (T * k,) int32: row r of the order is slot slots[r], of token slots[r] // k; dropped slots are last.
    positions: (T, k) int32, the row of each slot, -1 for a dropped one.
    starts, ends: (num_experts,) int32: rows starts[e] <= r < ends[e] are those of expert e, as `grouped_matmul` takes
    them; groups begin at any row there, so nothing is padded to blocks.
    The result repeats bit for bit.   An expert that a token has twice gets two rows.
    On a CPU, and on a GPU under TILEWRIGHT_CHECK=1, ids outside of -1..experts-1 raise InputError; otherwise they are
    dropped.   There is no gradient.
    backend: run on exactly this backend ("triton" up to 2048 experts, "torch") or raise BackendError.
    Raises InputError for other dtypes and shapes.
    """
    args = MoeAlignArgs(topk_ids, expert_map, num_experts)
    result: tuple[Tensor, Tensor, Tensor, Tensor] = call(CONTRACT, args, backend)
    return result


def reference(
    topk_ids: Tensor, num_experts: int, *, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plain torch: a stable sort."""
    experts = assignment.local_experts(topk_ids, expert_map, num_experts).flatten()
    slots = experts.sort(stable=True).indices
    steps = torch.arange(experts.shape[0], device=experts.device)
    positions = torch.empty_like(steps).scatter(0, slots, steps)
    positions = torch.where(experts < num_experts, positions, -1).view(topk_ids.shape)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
    ends = counts.scatter_add(0, experts, torch.ones_like(experts))[:num_experts].cumsum(0)
    starts = torch.cat((torch.zeros_like(ends[:1]), ends[:-1]))
    slots_int32, positions_int32, starts, ends = (t.to(torch.int32) for t in (slots, positions, starts, ends))
    return slots_int32, positions_int32, starts, ends


def align_bucket(args: MoeAlignArgs) -> MoeAlignBucket:
    """What a choice of kernel may depend on."""
    return MoeAlignBucket(row_bucket(args.topk_ids.numel()), hint(args.num_experts))


def _outputs(args: MoeAlignArgs) -> tuple[tuple[Any, torch.dtype], ...]:
    tokens, k = args.topk_ids.shape
    return tuple(
        (shape, torch.int32) for shape in ((tokens * k,), (tokens, k), (args.num_experts,), (args.num_experts,))
    )


FORWARD = RawOp(
    "moe_align",
    "fwd",
    MoeAlignArgs,
    package="tilewright.ops.moe",
    kernels=("triton.moe_align",),
    outputs=_outputs,
    reference=lambda args: reference(args.topk_ids, args.num_experts, expert_map=args.expert_map),
    bucket=align_bucket,
    bucket_names=MoeAlignBucket._fields,
    batch_fields=("S",),
    count=4,
    dtypes=(torch.int32, torch.int64),
)


def check(args: MoeAlignArgs) -> None:
    """Raise InputError for what the docstring of `moe_align` excludes."""
    assignment.check_experts("moe_align", args.topk_ids, args.expert_map, args.num_experts)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M tokens, E experts, K experts a token, and those of `assignment.random_ids`; mapped: of every four
    experts three are elsewhere.
    """
    ids = assignment.random_ids(params, dtype, device, seed)
    experts = params["E"]
    if not params.get("mapped"):
        return Sample((ids, experts))
    mapped = torch.full((experts,), -1, dtype=torch.int32, device=device)
    local = torch.arange(-(-experts // 4), dtype=torch.int32, device=device)
    mapped[::4] = local
    return Sample((ids, local.shape[0]), {"expert_map": mapped})


def cost(sample: Sample, direction: str) -> Cost:
    """Reads the ids; writes a slot and a position for each, and two limits an expert."""
    ids, experts = sample.args
    return Cost(ids.numel(), rows.nbytes(ids), 8 * (ids.numel() + experts))


def _case(name: str, m: int, e: int, k: int, dtype: torch.dtype = torch.int64, **options: Any) -> Workload:
    return Workload(name, {"M": m, "E": e, "K": k, **options}, (dtype,), ("fwd",))


def _bad(name: str, make: Any, match: str) -> BadInput:
    return BadInput(name, make, match)


def _ids(device: torch.device, *ids: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([ids], dtype=dtype, device=device)


CONTRACT = register(
    Contract(
        name="moe_align",
        family="moe",
        summary="rows of each expert, and the row of each token and expert",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        workloads=(
            _case("deepseek_4096", 4096, 256, 8),
            _case("qwen3_30b_8192", 8192, 128, 8),
            _case("decode_64", 64, 128, 8),
            _case("decode_1", 1, 256, 8),
        ),
        cpu_workloads=(_case("small", 64, 64, 4),),
        edge_cases=(
            _case("few: most experts have no token", 5, 40, 2),
            _case("one_token: k rows", 1, 16, 8),
            _case("one: an expert has all tokens", 33, 9, 1, chosen=1),
            _case("odd: more slots than a block", 301, 7, 3),
            _case("blocks: more blocks than are counted at once", 2311, 5, 2),
            _case("dropped: ids of -1", 50, 12, 4, dropped=True),
            _case("mapped: experts of other devices", 40, 18, 4, mapped=True, dropped=True),
            _case("one_expert: slots as they are", 20, 1, 1),
            _case("twice: an expert that a token has twice", 12, 5, 6, again=True),
            _case("empty: no tokens", 0, 8, 2),
        ),
        bad_inputs=(
            _bad("a vector", lambda d: Sample((_ids(d, 1, 2)[0], 4)), r"needs \(T, k\)"),
            _bad("16 bits", lambda d: Sample((_ids(d, 1, dtype=torch.int16), 4)), "torch.int16"),
            _bad("no experts", lambda d: Sample((_ids(d, 0), 0)), "at least 1"),
            _bad(
                "a map of 64 bits",
                lambda d: Sample((_ids(d, 0), 2), {"expert_map": torch.zeros(4, dtype=torch.int64, device=d)}),
                "expert_map is .* torch.int64",
            ),
        ),
        dtypes=(torch.int64, torch.int32),
        batch_dim=None,
        edge_grid={"K": (1,)},
    )
)
