"""Shared by the launches of the few-rows kernel: tensor maps, strides, grid."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.collect import collecting
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tensor_map import TensorMap, tensor_map
from tilewright.ops.gemm.kernels.sm90 import few_rows_model as model
from tilewright.ops.gemm.kernels.sm90.dense_kernel import halves_map
from tilewright.ops.gemm.kernels.sm90.few_rows_model import Config
from tilewright.ops.gemm.operands import Major, major_b
from tilewright.ops.gemm.scaled.scaling import Scaling

FILE = Path(__file__).with_name("few_rows.cuh")
_WIDTH = 4  # results that a thread stores at once


def check_split(config: Config, depth: int, itemsize: int) -> None:
    """Raises InputError if a block of a cluster would have no k block."""
    k_blocks = model.steps(depth, itemsize)
    if config.split > k_blocks:
        raise InputError(
            f"few_rows: split={config.split} leaves blocks without work, K={depth} has {k_blocks} steps of "
            f"{model.STAGE_BYTES // itemsize}; take a split of at most that, as `candidates` does"
        )


def operand_maps(
    a: Tensor, b: Tensor, token_rows: int, halves: bool = False
) -> tuple[TensorMap | None, TensorMap | None]:
    """Returns maps of b (B, K, N), the weights, and of a (B, M, K), the tokens, with `token_rows` tokens in a box.

    halves: a box of weights has rows of both halves of N
    """
    chunk = model.SPAN // a.itemsize
    if halves:
        return halves_map(b.mT, model.BLOCK_N), tensor_map(a, (1, token_rows, chunk), swizzle=model.SPAN)
    # Weights along N have 16 bits: a box is 64 rows of K by 64 columns
    weights = tensor_map(b if along_n(b) else b.mT, (1, model.BLOCK_N, chunk), swizzle=model.SPAN)
    return weights, tensor_map(a, (1, token_rows, chunk), swizzle=model.SPAN)


def along_n(b: Tensor) -> bool:
    """Returns whether the weights are contiguous along N."""
    return major_b(b) is Major.MN


def scale_maps(
    scale_a: Tensor | None, scale_b: Tensor | None, scaling: int, token_rows: int, absent: TensorMap | None
) -> tuple[TensorMap | None, TensorMap | None]:
    """Returns maps of the scales of weights and of tokens if they come through the ring, else `absent`.

    token_rows: rows of a box of token scales
    """
    weights = tokens_ = absent
    if scaling in (Scaling.TOKEN_BLOCK, Scaling.TOKEN_TOKEN):
        assert scale_a is not None
        tokens_ = tensor_map(scale_a.mT, (1, model.CHUNKS, token_rows))
    if scaling == Scaling.TOKEN_TOKEN:
        assert scale_b is not None
        weights = tensor_map(scale_b.mT, (1, model.CHUNKS, model.BLOCK_N))
    return weights, tokens_


def scale_strides(scale_a: Tensor | None, scale_b: Tensor | None) -> tuple[int, int, int]:
    """Returns the batch strides of both, and the stride between rows of blocks of scale_b."""
    if scale_a is None or scale_b is None:
        return 0, 0, 0
    return scale_a.stride(0), scale_b.stride(0), scale_b.stride(1)


def stores_vectors(d: Tensor) -> bool:
    """Returns whether four neighbouring results (two of "swiglu") can be stored at once in every row of d."""
    if collecting() is not None:
        return False
    vector = _WIDTH * d.itemsize
    return d.data_ptr() % vector == 0 and all(stride * d.itemsize % vector == 0 for stride in d.stride()[:2])


def launch_clusters(
    kernel: CudaKernel,
    config: Config,
    shared_bytes: int,
    tiles: int,
    device: torch.device,
    args: tuple[Any, ...],
    params: Any,
) -> None:
    """Launches as many clusters as run at once, at most one for each tile."""
    clusters = min(tiles, model.resident(config.split, config.ctas, usable_sms(device)))
    kernel(
        (clusters * config.split,),
        args,
        params,
        block=model.THREADS,
        shared_bytes=shared_bytes,
        cluster=(config.split, 1, 1) if config.split > 1 else None,
    )
