"""The public ops.  Each is a function; its contract, reference and backends live in the folder of its name."""

from tilewright.ops.activation.geglu import geglu
from tilewright.ops.activation.gelu_and_mul import gelu_and_mul
from tilewright.ops.activation.silu_and_mul import silu_and_mul
from tilewright.ops.activation.swiglu import swiglu
from tilewright.ops.gemm.bmm import bmm
from tilewright.ops.gemm.matmul import matmul
from tilewright.ops.gemm.splitk_reduce import splitk_reduce
from tilewright.ops.norm.add_rms_norm import add_rms_norm
from tilewright.ops.norm.layer_norm import layer_norm
from tilewright.ops.norm.rms_norm import rms_norm
from tilewright.ops.reduction.softmax import softmax
from tilewright.ops.rope.apply_rope import apply_rope

__all__ = [
    "add_rms_norm",
    "apply_rope",
    "bmm",
    "geglu",
    "gelu_and_mul",
    "layer_norm",
    "matmul",
    "rms_norm",
    "silu_and_mul",
    "softmax",
    "splitk_reduce",
    "swiglu",
]
