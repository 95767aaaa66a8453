"""The raw arguments of `linear_jsd`."""

from typing import NamedTuple

from torch import Tensor

from tilewright.ops.loss.divergence import Options


class LinearJsdArgs(NamedTuple):
    hidden: Tensor  # (M, H)
    weight: Tensor  # (V, H)
    teacher_hidden: Tensor  # (M, H of the teacher)
    teacher_weight: Tensor  # (V, H of the teacher)
    target: Tensor | None  # (M,)
    bias: Tensor | None  # (V,)
    teacher_bias: Tensor | None  # (V,)
    beta: float
    temperature: float
    hard_weight: float
    ignore_index: int
    reduction: str
    kind: str
    chunk_rows: int  # 0: by memory
    need_dhidden: bool  # which gradients the forward computes, for a dloss of 1
    need_dweight: bool
    need_dbias: bool


class LinearJsdBackwardArgs(NamedTuple):
    hidden: Tensor  # (M, H)
    weight: Tensor  # (V, H)
    teacher_hidden: Tensor  # (M, H of the teacher)
    teacher_weight: Tensor  # (V, H of the teacher)
    target: Tensor | None  # (M,)
    bias: Tensor | None  # (V,)
    teacher_bias: Tensor | None  # (V,)
    row_count: Tensor  # ()
    dloss: Tensor  # () or (M,)
    beta: float
    temperature: float
    hard_weight: float
    ignore_index: int
    reduction: str
    kind: str
    chunk_rows: int
    need_dhidden: bool
    need_dweight: bool
    need_dbias: bool


def options_of(args: LinearJsdArgs | LinearJsdBackwardArgs) -> Options:
    """The options of the divergence, which is that of logits."""
    return Options(args.beta, args.temperature, args.ignore_index, args.reduction, log_probs=False, kind=args.kind)
