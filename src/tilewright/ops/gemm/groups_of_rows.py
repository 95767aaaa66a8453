"""Starts and ends of groups from the group id of each row."""

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.arguments import Size
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.ops.gemm.grouped.calls import contiguous
from tilewright.ops.gemm.grouped.samples import parts


class GroupsOfRowsArgs(NamedTuple):
    ids: Tensor  # (T,) int32
    groups: Size


class GroupsOfRowsBucket(NamedTuple):
    T: int
    G: int


@dispatch("groups_of_rows")
def groups_of_rows(ids: Tensor, groups: int, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """(starts, ends), each (groups,) int32: rows starts[g] <= i < ends[g] are those with ids[i] == g.

    ids: (T,) int32, the group of each row, -1 for rows of padding; rows of a group stand next to each other, groups in
    any order.  A group without rows gets 0 and 0.  Ids outside of 0..groups-1 count as padding.
    What comes out are `starts` and `ends` of `grouped_matmul`; nothing leaves the device.
    Raises InputError for ids of another dtype or rank.
    """
    result: tuple[Tensor, Tensor] = call(CONTRACT, GroupsOfRowsArgs(contiguous(ids), groups), backend)
    return result


def reference(ids: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The same in plain torch: the least and the largest row of each group."""
    rows = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
    valid = (ids >= 0) & (ids < groups)
    index = torch.where(valid, ids, groups).to(torch.int64)
    first = torch.full((groups + 1,), ids.shape[0], dtype=torch.int32, device=ids.device)
    first = first.scatter_reduce(0, index, rows, "amin")[:groups]
    last = torch.zeros(groups + 1, dtype=torch.int32, device=ids.device)
    last = last.scatter_reduce(0, index, rows + 1, "amax")[:groups]
    return torch.where(last > 0, first, 0), last


FORWARD = RawOp(
    "groups_of_rows",
    "fwd",
    GroupsOfRowsArgs,
    package="tilewright.ops.gemm",
    kernels=("triton.groups_of_rows",),
    outputs=lambda args: (((args.groups,), torch.int32), ((args.groups,), torch.int32)),
    reference=lambda args: reference(args.ids, args.groups),
    bucket=lambda args: GroupsOfRowsBucket(row_bucket(args.ids.shape[0]), hint(args.groups)),
    bucket_names=GroupsOfRowsBucket._fields,
    batch_fields=("T",),
    count=2,
    dtypes=(torch.int32,),
)


def check(args: GroupsOfRowsArgs) -> None:
    """Raises InputError for what the docstring of `groups_of_rows` excludes."""
    op = "groups_of_rows"
    ids, groups = args
    if not isinstance(ids, Tensor) or ids.dtype != torch.int32 or ids.dim() != 1:
        got = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise InputError(f"{op}: ids is {got}; needs (T,) torch.int32, the group of each row.")
    if not isinstance(groups, (int, torch.SymInt)) or isinstance(groups, bool) or groups < 1:
        raise InputError(f"{op}: groups is {groups!r}; needs the number of groups, at least 1.")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: G, M (rows a group has on average), optional split as in `samples.parts`, padding (rows after a group,
    on average), shuffled (groups in any order).
    """
    draw = random.Random(seed)
    sizes = parts(params["G"] * params["M"], params["G"], params.get("split", "random"), seed)
    gaps = parts(params["G"] * params.get("padding", 0), params["G"], "random", seed + 1)
    order = list(range(params["G"]))
    if params.get("shuffled"):
        draw.shuffle(order)
    ids: list[int] = []
    for g in order:
        ids += [g] * sizes[g] + [-1] * gaps[g]
    return Sample((torch.tensor(ids, dtype=torch.int32).to(device), params["G"]))


def cost(sample: Sample, direction: str) -> Cost:
    """A comparison an id, which is read once; starts and ends are written once."""
    ids, groups = sample.args
    return Cost(ids.numel(), 4 * ids.numel(), 8 * groups)


def _case(name: str, g: int, m: int, **options: Any) -> Workload:
    return Workload(name, {"G": g, "M": m, **options}, (torch.int32,), ("fwd",))


CONTRACT = register(
    Contract(
        name="groups_of_rows",
        family="grouped",
        summary="starts and ends of groups from the group of each row",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        workloads=(_case("8x4096", 8, 4096), _case("256x128", 256, 128)),
        cpu_workloads=(_case("small", 8, 256),),
        edge_cases=(
            _case("ragged: some groups are empty", 9, 5),
            _case("padding: rows of no group between", 7, 6, padding=9),
            _case("shuffled: groups in any order", 7, 6, padding=3, shuffled=True),
            _case("one: a single group has all rows", 5, 8, split="one"),
            _case("blocks: more rows than a program reads", 3, 900, padding=40),
            _case("empty: no rows", 4, 0),
        ),
        bad_inputs=(
            BadInput("64 bits", lambda d: Sample((torch.zeros(4, dtype=torch.int64, device=d), 2)), "torch.int64"),
            BadInput("a matrix", lambda d: Sample((torch.zeros(4, 1, dtype=torch.int32, device=d), 2)), r"\(4, 1\)"),
            BadInput("no groups", lambda d: Sample((torch.zeros(4, dtype=torch.int32, device=d), 0)), "at least 1"),
        ),
        dtypes=(torch.int32,),
        batch_dim=None,
    )
)
