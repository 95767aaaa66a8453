"""Elements of 16 bits that stay packed in registers between two uses (NVIDIA)."""

import triton
import triton.language as tl


@triton.jit
def opaque_fp32(x: tl.tensor, PACKED: tl.constexpr) -> tl.tensor:
    """x in float32 for its second use.  PACKED: hide x from the compiler, which would otherwise keep the float32 values
    of the first use, in twice the registers.
    """
    if PACKED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x.to(tl.float32)
