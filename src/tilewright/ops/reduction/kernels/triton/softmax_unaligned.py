"""Softmax and its logarithm of rows that begin at any element, such as those of a vocabulary of 50257, in Triton: forms
of `softmax.py`.

A row is divided into head, body and tail as `ops/unaligned_rows.py` says; the body is what the plain kernels take for
the row, and head and tail join its maximum and sums.  Where in a row the sums of a thread begin depends on the address
of the row, so the bits of a row depend on its place in the batch.
Traffic as there: 4*M*N bytes forward at bf16, so 2000x50257 cannot beat 96 us at 4.2 TB/s; backward 6*M*N, 144 us.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.reduction import log_softmax
from tilewright.ops.reduction.kernels.triton import softmax as plain
from tilewright.ops.reduction.kernels.triton.softmax_unaligned_kernels import (
    softmax_unaligned_backward_kernel,
    softmax_unaligned_backward_long_kernel,
    softmax_unaligned_kernel,
    softmax_unaligned_long_kernel,
    softmax_unaligned_part_kernel,
    softmax_unaligned_scale_kernel,
)
from tilewright.ops.reduction.log_softmax import LogSoftmaxArgs, LogSoftmaxBackwardArgs
from tilewright.ops.reduction.softmax import BACKWARD, FORWARD, SoftmaxArgs, SoftmaxBackwardArgs
from tilewright.ops.rows import RowsBucket, as_rows
from tilewright.ops.unaligned_rows import odd_length, unaligned


class UnalignedConfig(NamedTuple):
    """Fields as in `softmax.Config`.   packed: on NVIDIA alone."""

    held: int
    num_warps: int
    rows: int = 1
    num_stages: int = 1
    steps: int = 2
    split: int = 0
    packed: bool = False


_ONE_WAVE = 256  # rows, one or two for each multiprocessor
WHOLE = 2 * plain.REGISTERS  # elements of 16 bits that 16 warps hold packed, 64 registers a thread


def configure(bucket: RowsBucket, dtype: torch.dtype) -> UnalignedConfig | None:
    m, n = bucket
    if not odd_length(n, dtype):
        return None
    if n > plain.REGISTERS and m > plain.SPLIT_ROWS and dtype.itemsize == 2:
        # Two passes over parts of a row keep more programs on a multiprocessor: 77.6 us at 2000 x 32776 and 130.9 at
        # 2000 x 50257, 114.6 and 129.7 with the whole row held.  Of few rows each takes as long as its two passes: 8 x
        # 50257 takes 7.9 us held and 12.5 in parts (H200, 2026-11)
        if m > _ONE_WAVE:
            return UnalignedConfig(plain.REGISTERS // 4, num_warps=8, packed=True)
        if n <= WHOLE:
            return UnalignedConfig(WHOLE, num_warps=16, packed=True)
    return UnalignedConfig(*plain.configure(bucket, dtype))


def configure_backward(bucket: RowsBucket, dtype: torch.dtype) -> UnalignedConfig | None:
    if not odd_length(bucket.N, dtype):
        return None
    config = UnalignedConfig(*plain.configure_backward(bucket, dtype))
    if config.held < bucket.N and dtype.itemsize == 2:  # as above
        return config._replace(held=2 * config.held, packed=True)
    return config


_LENGTHS = tuple((1 << k) + 1 for k in range(9, 17))
CONFIGS = tuple(
    dict.fromkeys(
        config
        for n in _LENGTHS
        for m in (1, 8, 128, 4096)
        if (config := configure(RowsBucket(m, n), torch.bfloat16)) is not None
    )
)
BACKWARD_CONFIGS = tuple(
    dict.fromkeys(
        config for n in _LENGTHS if (config := configure_backward(RowsBucket(4096, n), torch.bfloat16)) is not None
    )
)


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[UnalignedConfig, ...]:
    """Those of the plain kernel, and whole rows held packed."""
    m, n = bucket
    if not odd_length(n, dtype):
        return ()
    warps = (16, 32) if dtype.itemsize == 2 and plain.REGISTERS < n <= WHOLE and m >= plain.SPLIT_ROWS else ()
    whole_rows = (UnalignedConfig(WHOLE, num_warps, packed=True) for num_warps in warps)
    return *whole_rows, *(UnalignedConfig(*config) for config in plain.candidates(bucket, dtype))


def candidates_backward(bucket: RowsBucket, dtype: torch.dtype) -> tuple[UnalignedConfig, ...]:
    if not odd_length(bucket.N, dtype):
        return ()
    return tuple(UnalignedConfig(*config) for config in plain.candidates_backward(bucket, dtype))


UNALIGNED = plain.Forms(
    TritonKernel(softmax_unaligned_kernel),
    TritonKernel(softmax_unaligned_long_kernel),
    TritonKernel(softmax_unaligned_part_kernel),
    TritonKernel(softmax_unaligned_scale_kernel),
    TritonKernel(softmax_unaligned_backward_kernel),
    TritonKernel(softmax_unaligned_backward_long_kernel),
)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=UnalignedConfig,
    configs=CONFIGS,
    candidates=candidates,
    batch_invariant=False,
)
def launch(outs: tuple[Tensor], args: SoftmaxArgs, config: UnalignedConfig) -> None:
    _forward(outs[0], args.x, config, log=False)


@register_kernel(
    log_softmax.FORWARD,
    configure=configure,
    config_type=UnalignedConfig,
    configs=CONFIGS,
    candidates=candidates,
    batch_invariant=False,
)
def launch_log(outs: tuple[Tensor], args: LogSoftmaxArgs, config: UnalignedConfig) -> None:
    _forward(outs[0], args.x, config, log=True)


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=UnalignedConfig,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
    batch_invariant=False,
)
def launch_backward(outs: tuple[Tensor], args: SoftmaxBackwardArgs, config: UnalignedConfig) -> None:
    _backward(outs[0], args.dy, args.y, config, log=False)


@register_kernel(
    log_softmax.BACKWARD,
    configure=configure_backward,
    config_type=UnalignedConfig,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
    batch_invariant=False,
)
def launch_log_backward(outs: tuple[Tensor], args: LogSoftmaxBackwardArgs, config: UnalignedConfig) -> None:
    _backward(outs[0], args.dy, args.y, config, log=True)


def _forward(y: Tensor, x: Tensor, config: UnalignedConfig, *, log: bool) -> None:
    forms = UNALIGNED if unaligned(as_rows(x), as_rows(y)) else plain.ALIGNED
    plain.forward(y, x, plain.Config(*config), log=log, forms=forms)


def _backward(dx: Tensor, dy: Tensor, y: Tensor, config: UnalignedConfig, *, log: bool) -> None:
    forms = UNALIGNED if unaligned(as_rows(y), as_rows(dy), as_rows(dx)) else plain.ALIGNED
    plain.backward(dx, dy, y, plain.Config(*config), log=log, forms=forms)
