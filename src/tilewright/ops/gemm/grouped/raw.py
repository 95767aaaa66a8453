"""The raw forward op of `grouped_matmul` and `masked_matmul`: one batch of rows, or one a group."""

from collections.abc import Sequence

import torch

from tilewright.dispatch import RawOp
from tilewright.ops.gemm.dense.raw import refuses_out
from tilewright.ops.gemm.grouped.args import GroupedArgs, GroupedBucket, grouped_bucket
from tilewright.ops.gemm.grouped.reference import rows_product
from tilewright.ops.gemm.operands import FP8, RESULTS, columns_out

KERNELS = ("sm90.few_rows_grouped", "sm90.dense", "sm90.fp8", "triton.grouped_rows")


def forward_op(op: str) -> RawOp:
    """`_<op>_fwd`: a (Ba, R, K), b (G, K, N) of any strides with a unit one among their last two."""
    return RawOp(
        op,
        "fwd",
        GroupedArgs,
        package="tilewright.ops.gemm",
        kernels=KERNELS,
        outputs=_outputs,
        reference=rows_product,
        bucket=grouped_bucket,
        bucket_names=GroupedBucket._fields,
        batch_fields=("rows",),
        dtypes=(*RESULTS, FP8),
        out=True,
        reference_writes=True,
        refuses_out=refuses_out,
    )


def _outputs(args: GroupedArgs) -> tuple[tuple[Sequence[int], torch.dtype]]:
    return (((args.a.shape[0], args.a.shape[1], columns_out(args.b.shape[-1], args.activation)), args.out_dtype),)
