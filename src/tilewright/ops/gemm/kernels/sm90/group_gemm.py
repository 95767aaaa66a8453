"""Products of different shapes for Hopper, group_gemm: the kernels of `matmul`, each started while the
previous one ends.

Each product has its own tile size; in Triton's single launch all share that of the largest.
"""

from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.gemm.dense.args import MatmulArgs, as_batch, matmul_bucket, plain_args
from tilewright.ops.gemm.group_gemm import FORWARD, GroupGemmArgs, offsets
from tilewright.ops.gemm.kernels.sm90 import dense, dense_kernel, few_rows


def why_not(args: GroupGemmArgs) -> str | None:
    """Why one of the products cannot run; None if all can."""
    reasons = (dense.why_not(product) for product in _products(args))
    return next((reason for reason in reasons if reason is not None), None)


def _products(args: GroupGemmArgs) -> list[MatmulArgs]:
    return [plain_args(left, right, args.out_dtype) for left, right in zip(args.lefts, args.rights, strict=True)]


@register_kernel(FORWARD, why_not=why_not)
def launch(outs: tuple[Tensor], args: GroupGemmArgs, config: None) -> None:
    """Launches once for each nonempty product; a product with K = 0 is zero."""
    for product, offset, m, n in zip(_products(args), *offsets(args), strict=True):
        d = outs[0][offset : offset + m * n].view(1, m, n)
        if not product.a.shape[1]:
            d.zero_()
        elif d.numel():
            bucket, dtype = matmul_bucket(product), product.a.dtype
            few = few_rows.configure(bucket, dtype)
            if few is not None:
                few_rows.gemm(d, as_batch(product), few)
            else:
                dense_kernel.gemm(d, as_batch(product), dense.configure(bucket, dtype))
