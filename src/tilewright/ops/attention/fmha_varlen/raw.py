"""The raw ops of `fmha_varlen`: those of `fmha`, under a name of their own in tables, because tokens of many sequences
in one row want other tiles than one sequence of that length.
"""

from dataclasses import replace

from tilewright.dispatch import RawOp
from tilewright.ops.attention.fmha import raw


def _as_packed(op: RawOp) -> RawOp:
    return RawOp(
        "fmha_varlen",
        op.direction,
        op.schema,
        package="tilewright.ops.attention.fmha_varlen",
        outputs=op.outputs,
        reference=op.reference,
        bucket=op.bucket,
        bucket_names=op.bucket_names,
        count=op.count,
        torch_first=op.torch_first,
    )


FORWARD = _as_packed(raw.FORWARD)
GRADIENT = replace(raw.GRADIENT, op=_as_packed(raw.BACKWARD))
