"""Which calls of a patched module on a CPU stay with its own forward: those that our kernel was measured to lose.

A call of an op costs 15 us more than one of torch's own. On one thread of an EPYC (AVX-512, 2026-11) `rms_norm` pays
from 64 K elements on (41 us in torch, 35 in ours, bf16), `apply_rope` from 128 K, `swiglu` from 64 K of an MLP's input,
whose gate is some 2.7 times as wide (81 us and 64). `layer_norm` and those of 2^62 below have no CPU kernel.
Inductor fuses a module's own forward into its neighbours, but not an op, so compiled code keeps the former.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tilewright.dispatch.preference import resolve

_LEAST = {"rms_norm": 1 << 16, "swiglu": 1 << 16, "apply_rope": 1 << 17}
_LEAST |= dict.fromkeys(("qk_norm_rope", "rms_norm_gated", "relu2", "fused_moe"), 1 << 62)
_NEVER = "layer_norm"  # verification neither: in bf16 torch's weight gradient is 15 times as far off as model code's

_every_size = [False]


@contextmanager
def every_size_on_ops() -> Iterator[None]:
    """Run our ops at every size inside the block: verification looks at what longer inputs will run."""
    before = _every_size[0]
    _every_size[0] = True
    try:
        yield
    finally:
        _every_size[0] = before


def stays_with_torch(op: str, x: Tensor, backend: str | None) -> bool:
    """Does a call of `op` on x run as the module defines it?  Only where no backend is requested."""
    if x.device.type != "cpu" or resolve(backend)[0] != "auto":
        return False
    if op == _NEVER:
        return True
    if _every_size[0]:
        return False
    return torch.compiler.is_compiling() or x.numel() < _LEAST[op]
