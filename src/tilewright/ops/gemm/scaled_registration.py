"""Registers an engine as a backend of `scaled_matmul` or `scaled_matmul_fp8`; their files `<backend>.py` call this."""

from typing import Any

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.gemm.scaled.scaling import kernel_layouts


def register_scaled_matmul(backend: str, engine: Any) -> None:
    """engine: a module with Config, configure, candidates, CONFIGS as `engines/__init__.py` has them, for a bucket of
    eight numbers, and

        why_not(a, b, scale_a, scale_b, bias, c, alpha, activation, out_dtype) -> str | None
        gemm(d, a, b, scale_a, scale_b, bias, c, alpha, activation, config) -> None

    of d (B, M, N_out), a (B, M, K), b (B, K, N) K-major, scale_a (B, M blocks, K blocks), scale_b (B, N blocks,
    K blocks), the scales in the layouts of their scaling, c (B, M, N_out), which may be d.
    """

    @register_impl("scaled_matmul", backend=backend, **_choices(engine), supports=engine.why_not)
    def launch(outs: tuple[Tensor], *args: Any, config: Any) -> None:
        a, b, scale_a, scale_b, bias, c, alpha, activation, _ = args  # the last is out_dtype: that of outs
        left_scale, right_scale = kernel_layouts("scaled_matmul", a, b, scale_a, scale_b)
        d, left, right, left_scale, right_scale = (t.unsqueeze(0) for t in (outs[0], a, b, left_scale, right_scale))
        addend = None if c is None else c.unsqueeze(0)
        engine.gemm(d, left, right, left_scale, right_scale, bias, addend, alpha, activation, config)


def register_scaled_matmul_fp8(backend: str, engine: Any) -> None:
    """engine: as above, with two names of other arguments:

        why_not_fp8(a, b, scale_a, scale_b, bias, alpha, activation) -> str | None
        gemm_fp8(q, scales, a, b, scale_a, scale_b, bias, alpha, activation, config) -> None

    of q (B, M, N_out) e4m3, contiguous, and scales (B, M, ceil(N_out / 128)), consecutive rows adjacent in memory.  Its
    bucket says out_bits = 8.
    """

    @register_impl("scaled_matmul_fp8", backend=backend, **_choices(engine), supports=engine.why_not_fp8)
    def launch(outs: tuple[Tensor, Tensor], *args: Any, config: Any) -> None:
        a, b, scale_a, scale_b, *rest = args
        left_scale, right_scale = kernel_layouts("scaled_matmul_fp8", a, b, scale_a, scale_b)
        tensors = (t.unsqueeze(0) for t in (*outs, a, b, left_scale, right_scale))
        engine.gemm_fp8(*tensors, *rest, config)


def _choices(engine: Any) -> dict[str, Any]:
    return {
        "configure": engine.configure,
        "config_type": engine.Config,
        "configs": engine.CONFIGS,
        "candidates": engine.candidates,
    }
