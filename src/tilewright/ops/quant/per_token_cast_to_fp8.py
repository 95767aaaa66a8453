"""Activations to e4m3, a scale for each 128 elements of a row, or for each row."""

from typing import NamedTuple

from torch import Tensor

from tilewright.dispatch import Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops.quant import samples
from tilewright.ops.quant.casts import cast_contract
from tilewright.ops.quant.formats import check_matrix, pair
from tilewright.ops.quant.layout import ROW, TOKEN, TOKEN_UE8M0, ScaleLayout
from tilewright.ops.quant.numbers import cast
from tilewright.ops.rows import rows_bucket

OP = "per_token_cast_to_fp8"


class PerTokenCastArgs(NamedTuple):
    x: Tensor  # (..., M, K)
    group: int  # 128; 0: a scale for each row
    ue8m0: bool
    packed: bool


class PerTokenCastBucket(NamedTuple):
    M: int  # rounded up to a power of two
    K: int
    group: int


@dispatch(OP)
def per_token_cast_to_fp8(
    x: Tensor,
    *,
    group: int | None = 128,
    ue8m0: bool = False,
    packed: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(q, scales) with q * scales close to x: scale = max(amax, 1e-4) / 448 over `group` elements of a row, q rounded
    to nearest even.

    x: (..., M, K) bf16|fp16|fp32; any row stride; other strides cost a copy.      q: (..., M, K) float8_e4m3fn.
    scales: (..., M, ceil(K / 128)) float32 in the layout TOKEN, the scales of consecutive rows adjacent, as the
    GEMM kernels read them; (..., M, 1) in the layout ROW with group=None, one scale a row.

    ue8m0    round scales up to powers of two.
    packed   scales as int32, four UE8M0 exponents in one: layout TOKEN_UE8M0 (..., M, ceil(K / 512)); needs group=128
             and implies ue8m0.
    backend  run on exactly this backend ("triton", "torch") or raise BackendError.

    A group with a NaN or an infinity gets it as its scale; dequantised, all of the group is NaN.  There is no gradient.
    Raises InputError for other dtypes, fewer than two dimensions, another group, and x that requires a gradient.
    """
    args = PerTokenCastArgs(x, group or 0, True if packed else ue8m0, packed)
    result: tuple[Tensor, Tensor] = call(CONTRACT, args, backend)
    return result


def reference(
    x: Tensor, *, group: int | None = 128, ue8m0: bool = False, packed: bool = False
) -> tuple[Tensor, Tensor]:
    """Plain torch; a float64 input is not rounded, see `numbers`."""
    return cast(x, _layout(group or 0, packed), ue8m0 or packed)


def _layout(group: int, packed: bool) -> ScaleLayout:
    return TOKEN_UE8M0 if packed else TOKEN if group else ROW


FORWARD = RawOp(
    OP,
    "fwd",
    PerTokenCastArgs,
    package="tilewright.ops.quant",
    kernels=("triton.per_token_cast",),
    outputs=lambda args: pair(args.x.shape, _layout(args.group, args.packed)),
    reference=lambda args: cast(args.x, _layout(args.group, args.packed), args.ue8m0),
    bucket=lambda args: PerTokenCastBucket(*rows_bucket(args.x), args.group),
    bucket_names=PerTokenCastBucket._fields,
    count=2,
)


def check(args: PerTokenCastArgs) -> None:
    """Raise InputError for what the docstring of `per_token_cast_to_fp8` excludes."""
    check_matrix(OP, args.x)
    if args.group not in (0, 128):
        raise InputError(f"{OP}: group is {args.group}; allowed are 128 and None, a scale for each row.")
    if args.packed and not args.group:
        raise InputError(f"{OP}: packed=True with group=None; four scales along K share a word, so it needs group=128.")


def cost(sample: Sample, direction: str) -> Cost:
    """Reads x, writes q and the scales."""
    return samples.cast_cost(sample, _layout(sample.kwargs.get("group", 128) or 0, sample.kwargs.get("packed", False)))


CONTRACT = register(
    cast_contract(
        FORWARD,
        summary="bf16 rows to float8_e4m3 with a scale for each 128 elements or each row",
        reference=reference,
        check=check,
        cost=cost,
        options=("group", "ue8m0", "packed"),
        batch_dim=0,
        workloads=(
            *samples.activations(),
            *samples.activations("row_", group=None)[-4:],
            Workload("ue8m0_packed_8192x7168", {"M": 8192, "N": 7168, "packed": True}, directions=("fwd",)),
        ),
        edge_cases=(
            Workload("batch: groups of four adjacent rows in each matrix", {"B": 3, "M": 6, "N": 384}),
            Workload("one_row: a single program", {"M": 1, "N": 256}),
            Workload("odd_n: the last group is cut", {"M": 7, "N": 333}),
            Workload("n_1: a group of one", {"M": 5, "N": 1}),
            Workload("tall: more rows than a program takes", {"M": 70, "N": 130}),
            Workload("ue8m0: powers of two", {"M": 33, "N": 512, "ue8m0": True}),
            Workload("packed: four exponents a word", {"M": 33, "N": 1024, "packed": True}),
            Workload("packed_odd: absent exponents are 0", {"M": 6, "N": 650, "packed": True}),
            Workload("row: one scale a row", {"M": 9, "N": 700, "group": None}),
            Workload("row_ue8m0: one power of two a row", {"M": 3, "N": 48, "group": None, "ue8m0": True}),
            Workload("row_long: read twice", {"M": 2, "N": 20000, "group": None}),
            Workload("row_batch: the scales of all matrices are adjacent", {"B": 2, "M": 5, "N": 100, "group": None}),
            Workload("tiny: amax below the floor", {"M": 4, "N": 256, "scale": 1e-7}),
            Workload("special: NaN, infinities, zeros", {"M": 5, "N": 300, "special": True}),
            Workload("row_special: NaN, infinities, zeros", {"M": 5, "N": 300, "special": True, "group": None}),
            Workload("empty: no rows", {"M": 0, "N": 128}),
        ),
        bad_inputs=(
            samples.bad("group of 64", "group is 64; allowed are 128 and None", 4, 128, group=64),
            samples.bad("packed rows", "needs group=128", 4, 128, group=None, packed=True),
        ),
    )
)
