"""CUDA C++ that several test files compile."""

from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.gpu.jit_kernels import Product, Scale, Side, product_mn, scale, share_tile
from tests.jit.cuda_parts_weights import WEIGHTS, launched

import tilewright
from tilewright.jit.collect import collect
from tilewright.jit.compilers.cuda_build import find_tool
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.selftest import Copy, Tile, tma_copy, wgmma_tile
from tilewright.mask import causal, document, sequences
from tilewright.ops.attention.arguments import FmhaArgs, FmhaBackwardArgs
from tilewright.ops.attention.fmha_fp8.args import FmhaFp8Args
from tilewright.ops.attention.kernels.sm90 import backward, decode, decode_choice, fp8_forward, mla_backward
from tilewright.ops.attention.kernels.sm90 import forward as fmha_cuda
from tilewright.ops.attention.kernels.sm90 import mla_decode as mla_decode_cuda
from tilewright.ops.attention.kernels.sm90.backward_args import SumParams
from tilewright.ops.attention.mla.args import MlaBackwardArgs
from tilewright.ops.attention.mla_decode.args import problem_of
from tilewright.ops.attention.mla_decode.samples import inputs as mla_decode_inputs
from tilewright.ops.gemm.grouped.args import GroupedArgs
from tilewright.ops.gemm.kernels.sm90 import dense as dense_choice
from tilewright.ops.gemm.kernels.sm90 import dense_kernel as dense
from tilewright.ops.gemm.kernels.sm90 import few_rows as few_rows_kernel
from tilewright.ops.gemm.kernels.sm90 import few_rows_grouped as grouped
from tilewright.ops.gemm.kernels.sm90 import few_rows_model as model
from tilewright.ops.gemm.kernels.sm90 import few_rows_scaled as scaled
from tilewright.ops.gemm.kernels.sm90 import fp8 as fp8_choice
from tilewright.ops.gemm.kernels.sm90 import fp8_cost_model, fp8_kernel
from tilewright.ops.gemm.kernels.sm90.dense_kernel import GemmType
from tilewright.ops.gemm.operands import ACTIVATIONS, columns_out
from tilewright.ops.gemm.scaled.args import plain_scaled_args
from tilewright.ops.gemm.scaled.scaling import Scaling
from tilewright.ops.loss.kernels.sm90 import cross_entropy_in_place as entropy_cuda
from tilewright.ops.moe.kernels.sm90 import expert_rows, few_tokens
from tilewright.ops.quant.kernels.sm90 import per_tensor_cast
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.sampling.kernels.sm90 import greedy as greedy_cuda
from tilewright.ops.sampling.kernels.sm90 import resident
from tilewright.ops.sampling.kernels.sm90 import sample as sample_cuda
from tilewright.ops.sampling.kernels.sm90 import top_k as top_k_cuda
from tilewright.ops.sampling.kernels.sm90 import top_k_short as top_k_short_cuda

PROBE = 'extern "C" __global__ void probe(int* p) { *p = 1; }\n'
PROBLEM = dense_choice.Problem(1, 1, 1)
COPY = Copy(64, 64, 4, torch.bfloat16)


def gemm(block_m: int, block_n: int, cluster: tuple[int, int] = (1, 1), majors: str = "kk", **options: Any) -> Any:
    """Parameters of the dense GEMM.  majors: of A, of B, "k" or "m" for contiguous along K or along M or N."""
    a, b = (int(major == "m") for major in majors)
    element = options.get("element", torch.bfloat16)
    out = options.get("out", element)
    activation, bias, addend = options.get("activation", ""), options.get("bias", False), options.get("addend", 0)
    split, trim = options.get("split", 1), options.get("trim", False)
    stages = dense_choice.config_of(
        dense_choice.Tile(block_m, block_n, *cluster, split), dense_choice.Problem(1, 1, 1, mn_major_b=bool(b))
    ).stages
    return dense.Params(
        *(block_m, block_n, stages, *cluster, a, b, ACTIVATIONS.index(activation), bias, addend),
        *(element, out, out, out),
        kSplitK=split,
        kTrim=trim,
        kPrefetch=split > 1 or trim,
    )


def few_rows(tokens: int, stages: int, split: int, activation: str = "", along_n: bool = False, **types: Any) -> Any:
    """Parameters of the GEMM for few rows."""
    element = types.get("element", torch.bfloat16)
    out = types.get("out", element)
    code = ACTIVATIONS.index(activation)
    return few_rows_kernel.Params(tokens, stages, split, 1, along_n, code, element, out, out, out)


def quantised(scaling: Scaling, groups: int = 1, rows: int = 64) -> tuple[Any, ...]:
    """a (1, rows, 2048), b (groups, 2048, 512) in e4m3, K-major, and their scales."""
    a, b = (torch.empty(shape, dtype=torch.float8_e4m3fn) for shape in ((1, rows, 2048), (groups, 512, 2048)))
    of_a, of_b = scaling.layouts
    return a, b.mT, of_a.empty(rows, 2048, "cpu", 1), of_b.empty(512, 2048, "cpu", groups)


def fp8(
    tile: tuple[int, ...],
    scaling: int,
    activation: str = "",
    out: Any = torch.bfloat16,
    into: bool = False,
    **more: Any,
) -> Any:
    """Parameters of the GEMM of e4m3 operands; more: of `dense_kernel.Groups`, and rows, 768 that fill all tiles."""
    problem, rows = fp8_cost_model.Problem(1, 1, 1, scaling=scaling), more.pop("rows", 768)
    config = fp8_choice.config_of(fp8_cost_model.Tile(*tile), problem)
    operands, n_out = quantised(Scaling(scaling), more.get("count", 1), rows), columns_out(512, activation)
    d = torch.empty(1, rows, n_out, dtype=out)
    product = plain_scaled_args(*operands, out, activation)._replace(c=d if into else None)
    if out == torch.float8_e4m3fn:
        scales = TOKEN.empty(rows, n_out, "cpu", 1)
        return launched(lambda: fp8_kernel.gemm_fp8(d, scales, product, config))
    groups = dense.Groups(more.pop("gemm_type", GemmType.DENSE), **more)
    return launched(lambda: fp8_kernel.gemm(d, product, config, groups))


def few_rows_scaled(scaling: int, shape: tuple[int, int, int], activation: str = "") -> Any:
    """Parameters of the GEMM for few rows of e4m3.  shape: tokens, split, blocks a multiprocessor."""
    config = model.deepest(*shape, scaling)
    d = torch.empty(1, 64, columns_out(512, activation), dtype=torch.bfloat16)
    product = plain_scaled_args(*quantised(Scaling(scaling)), d.dtype, activation)
    return launched(lambda: scaled.gemm(d, product, config))


def few_rows_grouped(scaling: int, shape: tuple[int, int, int]) -> Any:
    """The same for four groups of rows; scaling -1: of 16-bit operands."""
    config = model.deepest(*shape, scaling, grouped=True)
    d, ends = torch.empty(1, 64, 512, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int32)
    if scaling == model.UNSCALED:
        a, b = torch.empty(1, 64, 2048, dtype=d.dtype), torch.empty(4, 512, 2048, dtype=d.dtype).mT
        given: tuple[Any, ...] = a, b, None, None
    else:
        given = quantised(Scaling(scaling), 4)
    return launched(lambda: grouped.gemm_rows(d, GroupedArgs(*given, None, ends, 64, "", d.dtype), config))


def tensor_cast(element: torch.dtype, config: per_tensor_cast.Config) -> per_tensor_cast.Params:
    """Parameters of the cast with one scale."""
    return per_tensor_cast.Params(*config, element)


def gated_experts(config: Any) -> Any:
    """Parameters of the first product of experts, four of them, whose gates are the first half of the weights."""
    a, b = torch.empty(1, 64, 2048, dtype=torch.bfloat16), torch.empty(4, 512, 2048, dtype=torch.bfloat16).mT
    d, ends = torch.empty(1, 64, 256, dtype=a.dtype), torch.empty(4, dtype=torch.int32)
    args = GroupedArgs(a, b, None, None, None, ends, 64, "swiglu", a.dtype)
    gemm_rows = grouped.gemm_rows if isinstance(config, model.Config) else dense_choice.gemm_rows
    return launched(lambda: gemm_rows(d, args, config, halves=True))


def ragged_experts(room: int, along_n: bool = False, gated: bool = False) -> Any:
    """Parameters of the products of four experts with some hundred rows each."""
    a, b = torch.empty(1, 1024, 2048, dtype=torch.bfloat16), torch.empty(4, 512, 2048, dtype=torch.bfloat16).mT
    b = b.contiguous() if along_n else b
    d, ends = torch.empty(1, 1024, 256 if gated else 512, dtype=a.dtype), torch.empty(4, dtype=torch.int32)
    args = GroupedArgs(a, b, None, None, None, ends, 256, "swiglu" if gated else "", a.dtype)
    return launched(lambda: expert_rows.gemm_rows(d, args, room))


def fmha(d: int, config: tuple[Any, ...], documents: bool = False, scale: float = 1.0, softcap: float = 0.0) -> Any:
    """Parameters of attention forward, causal, where asked with documents."""
    q, o = (torch.empty(1, 2, 64, d, dtype=torch.bfloat16) for _ in range(2))
    program, data = (
        (causal() & document(torch.zeros(64, dtype=torch.int32))).program("cpu") if documents else ("", None)
    )
    args = FmhaArgs(q, q, q, None, None, data, program, -1, -1 if documents else 0, scale, softcap)
    return launched(lambda: fmha_cuda.forward((o, torch.empty(1, 2, 64)), args, fmha_cuda.Config(*config)))


def fmha_fp8(d: int, config: tuple[Any, ...], blocks: bool = False, softcap: float = 0.0) -> Any:
    """Parameters of attention over float8, causal; no Triton kernel, which the interpreter cannot collect."""
    q, scales = torch.empty(1, 2, 256, d, dtype=torch.float8_e4m3fn), torch.empty(1, 2, 1 + blocks)
    o, lse = torch.empty(1, 2, 256, d, dtype=torch.bfloat16), torch.empty(1, 2, 256)
    tensors = q, q, q, scales, scales, scales
    args = FmhaFp8Args(*tensors, None, None, "", -1, 0, 1.0, softcap, torch.bfloat16)
    with mock.patch.object(fp8_forward, "transposed"):
        return launched(lambda: fp8_forward.forward((o, lse), args, fp8_forward.Config(*config)))


def mla(d: int, d_pe: int, config: tuple[Any, ...]) -> Any:
    """Parameters of attention forward with rotated parts, causal."""
    q, q_pe = (torch.empty(1, 2, 64, width, dtype=torch.bfloat16) for width in (d, d_pe))
    args = FmhaArgs(q, q, q, None, None, None, "", -1, 0, 1.0, 0.0)
    outs, chosen = (q, torch.empty(1, 2, 64)), fmha_cuda.Config(*config)
    return launched(lambda: fmha_cuda.forward(outs, args, chosen, pe=(q_pe, q_pe[:, :1])))


def fmha_backward(d: int, config: tuple[Any, ...], documents: bool = False) -> tuple[Any, ...]:
    """Parameters of the kernels of attention backward, in the order of their launches: causal, or of documents.

    Those for parts of grouped heads have the same.
    """
    q = torch.empty(1, 2, 64, d, dtype=torch.bfloat16)
    program, data = sequences(torch.tensor([0, 64]), length_q=64).program("cpu") if documents else ("", None)
    band = (-1, -1) if documents else (-1, 0)
    lse = torch.empty(1, 2, 64)
    args = FmhaBackwardArgs(q, None, q, q, q, q, lse, None, None, data, program, *band, 1.0, 0.0)
    with collect("sm_90") as collector:
        backward.backward((q, q, q, lse), args, backward.Config(*config))
    return tuple(job.key[2] for job in collector.jobs)  # type: ignore[index]


def entropy_params(element, *, kSmooth=False, kMean=True, kRows=False, kGiven=False):
    """Of rows held by 512 threads."""
    flags = {"kSmooth": kSmooth, "kMean": kMean, "kRows": kRows, "kGiven": kGiven}
    return entropy_cuda.Params(*entropy_cuda.CONFIGS[0], element, torch.int64, **flags)


def latent_backward(documents: bool = False) -> tuple[Any, ...]:
    """The same at DeepSeek's widths, with rotated parts; no Triton kernel, which the interpreter cannot collect."""
    q, q_pe = (torch.empty(1, 2, 64, width, dtype=torch.bfloat16) for width in (128, 64))
    program, data = sequences(torch.tensor([0, 64]), length_q=64).program("cpu") if documents else ("", None)
    band = (-1, -1) if documents else (-1, 0)
    tensors = q, q_pe, q, q_pe[:, :1], q
    args = MlaBackwardArgs(q, None, *tensors, q, torch.empty(1, 2, 64), data, program, *band, 1.0)
    with collect("sm_90") as collector, mock.patch.object(mla_backward, "head_sum"):
        mla_backward.backward(tensors, args, mla_backward.CONFIGS[0])
    return tuple(job.key[2] for job in collector.jobs)  # type: ignore[index]


def decoding(d: int, rows: int = 8, cache: int = 0, division: str = "EQUAL", cluster: int = 1) -> Any:
    """Parameters of attention over a KV cache.   cache: as in a bucket, of 16 bits, or e4m3 with scales of heads or of
    tokens.
    """
    unit = decode_choice.unit_of(d, cache, torch.bfloat16)
    config = next(c for c in decode_choice.space(unit, rows) if c.cluster == cluster)
    kind = torch.float8_e4m3fn if cache else torch.bfloat16
    number = decode_choice.Division[division].value
    return decode.Params(
        d,
        rows,
        config.keys,
        config.warps,
        config.warps,
        config.stages,
        number,
        cluster,
        cache == 2,
        torch.bfloat16,
        kind,
    )


def latent_decode(heads: int, **more: Any) -> tuple[Any, ...]:
    """Parameters of the two kernels of latent decoding.  more: of its samples."""
    sizes = {"H": heads, "D": 576, "d_v": 512, "lengths": (4000,), "page": 64, **more}
    args = problem_of(mla_decode_inputs(sizes, torch.bfloat16, torch.device("cpu"), 0))
    outs = torch.empty(*args.q.shape[:3], 512, dtype=torch.bfloat16), torch.empty(args.q.shape[:3])
    with collect("sm_90") as collector:
        mla_decode_cuda.launch(outs, args, mla_decode_cuda.Config())
    return tuple(job.key[2] for job in collector.jobs)  # type: ignore[index]


# (kernel, parameters, instructions that must be there)
# Bytes that the warps which only copy, and have 24 registers, keep in local memory; of the float8 forward also words
# about a tile of queries, beside 128 sums and scores in 160 registers
SPILLED = {
    "sm90_fmha_backward": 64,
    "sm90_fmha_backward_parts": 64,
    "sm90_mla_backward": 64,
    "sm90_fmha_fp8": 80,
}
INSTANCES: list[tuple[Any, Any, dict[str, int]]] = [
    (tma_copy, COPY, {"UTMASTG": 1}),
    (wgmma_tile, Tile(128, 4, torch.bfloat16, torch.bfloat16), {"HGMMA": 4, "UTMALDG": 2, "UTMASTG": 2}),
    (wgmma_tile, Tile(256, 3, torch.float16, torch.float32), {"HGMMA": 4, "UTMALDG": 2}),
    (wgmma_tile, Tile(64, 4, torch.float8_e4m3fn, torch.float16), {"QGMMA": 4, "UTMALDG": 2, "UTMASTG": 1}),
    (scale, Scale(128, torch.bfloat16), {}),
    (share_tile, Side(32), {"UTMALDG": 1, "UTMAREDG": 1}),
    (product_mn, Product(torch.float16), {"HGMMA": 4, "UTMALDG": 3}),
    # The four layouts, clusters of both kinds, every road of the epilogue
    (dense.KERNEL, gemm(128, 256), {"HGMMA": 4, "UTMALDG": 2, "UTMASTG": 4}),
    (dense.KERNEL, gemm(128, 128, (2, 1), "km"), {"HGMMA": 4, "UTMALDG": 3, "UTMASTG": 2}),
    (dense.KERNEL, gemm(128, 192, majors="mm", out=torch.float32, addend=2), {"HGMMA": 4, "UTMASTG": 6}),
    (dense.KERNEL, gemm(128, 256, (1, 2), activation="swiglu"), {"HGMMA": 4, "UTMASTG": 2}),
    (
        dense.KERNEL,
        gemm(64, 96, majors="mk", activation="gelu", bias=True, element=torch.float16),
        {"HGMMA": 4, "UTMALDG": 2, "UTMASTG": 3},
    ),
    # K split over a cluster, also of pairs that share an operand; boxes of rows that exist
    (dense.KERNEL, gemm(128, 256, split=8, trim=True), {"HGMMA": 4, "UTMALDG": 2}),
    (dense.KERNEL, gemm(128, 144, (2, 1), "mm", out=torch.float32, addend=2, split=4), {"HGMMA": 4}),
    (dense.KERNEL, gemm(64, 192, (1, 2), activation="swiglu", bias=True, split=3), {"HGMMA": 4}),
    (dense.KERNEL, gemm(64, 96, trim=True), {"HGMMA": 4, "UTMALDG": 2, "UTMASTG": 3}),
    (few_rows_kernel.KERNEL, few_rows(8, 6, 8), {"HGMMA": 8, "UTMALDG": 4}),
    (few_rows_kernel.KERNEL, few_rows(64, 4, 1, "swiglu"), {"HGMMA": 8, "UTMALDG": 4}),
    (few_rows_kernel.KERNEL, few_rows(16, 6, 2, along_n=True, element=torch.float16, out=torch.float32), {"HGMMA": 8}),
    # Groups of rows, and of K into the result
    (dense.KERNEL, gemm(128, 256)._replace(kGemmType=1), {"HGMMA": 4, "UTMALDG": 2, "UTMASTG": 4}),
    (
        dense.KERNEL,
        gemm(128, 128, (2, 1), "mm", out=torch.float32)._replace(kGemmType=2, kAccumulate=True),
        {"HGMMA": 4, "UTMAREDG": 4},
    ),
    # Scales of each kind, results that are added to or requantised, groups
    (fp8_kernel.KERNEL, fp8((256, 128), 2), {"UTMALDG": 4, "UTMASTG": 4}),
    (fp8_kernel.KERNEL, fp8((192, 128), 2), {"UTMALDG": 3, "UTMASTG": 2}),
    (fp8_kernel.KERNEL, fp8((128, 192), 2), {"UTMALDG": 3, "UTMASTG": 3}),
    (fp8_kernel.KERNEL, fp8((192, 128), 3, out=torch.float32, into=True), {"UTMALDG": 4, "UTMAREDG": 4}),
    (fp8_kernel.KERNEL, fp8((256, 112), 3, out=torch.float32), {"UTMALDG": 5, "UTMASTG": 14}),
    (fp8_kernel.KERNEL, fp8((128, 192), 1, "swiglu"), {"UTMALDG": 2, "UTMASTG": 3}),
    (fp8_kernel.KERNEL, fp8((128, 256), 2, "swiglu", torch.float8_e4m3fn), {"UTMALDG": 3, "UTMASTG": 1}),
    (fp8_kernel.KERNEL, fp8((128, 128), 2, gemm_type=GemmType.GROUPED_M, count=4), {"UTMALDG": 3, "UTMASTG": 2}),
    (fp8_kernel.KERNEL, fp8((128, 192, 1, 1, 5), 2, rows=96), {"UTMALDG": 3}),
    (fp8_kernel.KERNEL, fp8((128, 128, 1, 2, 4), 3, "gelu"), {"UTMALDG": 4}),
    (fp8_kernel.KERNEL, fp8((64, 256, 2, 1, 3), 1, "swiglu"), {"UTMALDG": 2}),
    (scaled.KERNEL, few_rows_scaled(0, (8, 2, 2)), {"QGMMA": 16, "UTMALDG": 4}),
    (scaled.KERNEL, few_rows_scaled(2, (64, 4, 1), "swiglu"), {"QGMMA": 16, "UTMALDG": 5}),
    # Gates and ups of experts take turns in a box of weights
    (
        dense.KERNEL,
        gated_experts(dense_choice.config_of(dense_choice.Tile(128, 256, 1, 1), PROBLEM)),
        {"HGMMA": 4, "UTMALDG": 2, "UTMASTG": 2},
    ),
    (grouped.KERNEL, gated_experts(model.deepest(32, 1, 1, model.UNSCALED, grouped=True)), {"HGMMA": 8, "UTMALDG": 4}),
    (expert_rows.KERNEL, ragged_experts(288, gated=True), {"HGMMA": 80, "UTMALDG": 2}),
    (expert_rows.KERNEL, ragged_experts(192), {"HGMMA": 48, "UTMALDG": 7}),
    (expert_rows.KERNEL, ragged_experts(288, along_n=True), {"HGMMA": 80, "UTMALDG": 11}),
    (few_tokens.ORDER, few_tokens.OrderParams(True, 64, torch.bfloat16, torch.int64), {}),
    (few_tokens.GATE, few_tokens.GateParams(torch.float16), {}),
    (few_tokens.SUM, few_tokens.SumParams(torch.bfloat16, torch.float32), {}),
    (grouped.KERNEL, few_rows_grouped(-1, (32, 2, 2)), {"HGMMA": 8, "UTMALDG": 4}),
    (grouped.KERNEL, few_rows_grouped(3, (16, 1, 1)), {"QGMMA": 16, "UTMALDG": 6}),
    *WEIGHTS,
    (per_tensor_cast.PREPARE, per_tensor_cast.PrepareParams(), {}),
    (per_tensor_cast.KERNEL, tensor_cast(torch.bfloat16, per_tensor_cast.CONFIGS[0]), {}),
    (per_tensor_cast.KERNEL, tensor_cast(torch.float32, per_tensor_cast.CONFIGS[1]), {}),
    (fmha_cuda.KERNEL, fmha(128, (2, 128, 2, 2, False)), {"HGMMA": 32, "UTMALDG": 18, "UTMASTG": 4}),
    (fmha_cuda.KERNEL, fmha(128, (2, 128, 2, 2), softcap=3.0), {"HGMMA": 32, "UTMALDG": 18}),
    (fmha_cuda.KERNEL, fmha(128, (2, 128, 2, 2), documents=True), {"HGMMA": 32, "UTMALDG": 18}),
    (fmha_cuda.KERNEL, fmha(64, (3, 128, 2, 2)), {"HGMMA": 24, "UTMALDG": 12, "UTMASTG": 3}),
    (fmha_cuda.KERNEL, fmha(256, (2, 64, 2, 1), scale=-1.0), {"HGMMA": 40, "UTMALDG": 28, "UTMASTG": 8}),
    (fmha_cuda.KERNEL_PE, mla(128, 64, (2, 128, 2, 1, False)), {"HGMMA": 40, "UTMALDG": 19, "UTMASTG": 4}),
    # Attention over a KV cache: every division of the keys, every kind of cache
    (decode.KERNEL, decoding(128), {"HMMA": 16}),
    (decode.KERNEL, decoding(128, rows=16, division="CLUSTER", cluster=16), {"HMMA": 32}),
    (decode.KERNEL, decoding(64, division="OWN"), {"HMMA": 16}),
    (decode.KERNEL, decoding(256), {"HMMA": 32}),
    (decode.KERNEL, decoding(128, cache=1), {"HMMA": 32}),
    (decode.KERNEL, decoding(128, rows=16, cache=2), {"HMMA": 64}),
    (decode.COMBINE, decoding(128)._replace(kWarps=1, kStages=1), {}),
    (decode.COMBINE, decoding(64, division="OWN")._replace(kWarps=1, kStages=1), {}),
    (fp8_forward.KERNEL, fmha_fp8(64, (3, 192, 2, 2, True, 2)), {"QGMMA": 28, "UTMALDG": 10}),
    (fp8_forward.KERNEL, fmha_fp8(128, (3, 128, 3, 2)), {"QGMMA": 16, "UTMALDG": 6}),
    (fp8_forward.KERNEL, fmha_fp8(128, (3, 128, 3, 2), blocks=True, softcap=3.0), {"QGMMA": 16, "UTMALDG": 6}),
    (fp8_forward.KERNEL, fmha_fp8(256, (2, 128, 2, 1, True, 2)), {"QGMMA": 32, "UTMALDG": 8}),
    # Attention backward, and the kernels before and after it
    (backward.PREPROCESS, fmha_backward(128, (64, 2, 2, 2))[0], {}),
    (backward.KERNEL, fmha_backward(128, (64, 2, 2, 2))[1], {"HGMMA": 64, "UTMALDG": 5, "UTMASTG": 1}),
    (backward.POSTPROCESS, fmha_backward(128, (64, 2, 2, 2))[2], {}),
    (backward.KERNEL_PARTS, fmha_backward(128, (64, 2, 2, 2))[1], {"HGMMA": 64, "UTMALDG": 5, "UTMASTG": 1}),
    (backward.SUM_PARTS, SumParams(torch.bfloat16), {}),
    (backward.INTERVALS, fmha_backward(64, (128, 2, 2, 2), documents=True)[0], {}),
    (
        backward.KERNEL,
        fmha_backward(64, (128, 2, 2, 2), documents=True)[2],
        {"HGMMA": 64, "UTMALDG": 5, "UTMASTG": 1},
    ),
    (mla_backward.KERNEL, latent_backward()[1], {"HGMMA": 88, "UTMALDG": 7, "UTMASTG": 1}),
    (mla_backward.KERNEL, latent_backward(documents=True)[2], {"HGMMA": 88, "UTMALDG": 7, "UTMASTG": 1}),
    (mla_backward.POSTPROCESS, latent_backward()[2], {}),
    # Losses
    (entropy_cuda.KERNEL, entropy_params(torch.bfloat16), {}),
    (entropy_cuda.KERNEL, entropy_params(torch.float32, kSmooth=True, kMean=False, kRows=True, kGiven=True), {}),
    # Sampling
    (greedy_cuda.KERNEL, greedy_cuda.Params(256, torch.float32), {}),
    (greedy_cuda.KERNEL, greedy_cuda.Params(256, torch.float16), {}),
    (sample_cuda.KERNEL, sample_cuda.Params(512, resident.row_offset(512), torch.float32), {}),
    (sample_cuda.KERNEL, sample_cuda.Params(256, resident.row_offset(256), torch.bfloat16), {}),
    (top_k_cuda.KERNEL, top_k_cuda.Params(512, top_k_cuda.row_offset(512, 2048), 2048, torch.float16), {}),
    (top_k_short_cuda.KERNEL, top_k_short_cuda.Params(4, 32, torch.bfloat16), {}),
    # Latent decoding: in pairs and alone, pages of 1, gathered rows
    (mla_decode_cuda.KERNEL, latent_decode(128)[0], {"HGMMA": 52, "UTMALDG": 18}),
    (mla_decode_cuda.KERNEL, latent_decode(16, page=1)[0], {"HGMMA": 52, "UTMALDG": 27}),
    (mla_decode_cuda.KERNEL, latent_decode(128, cache="e4m3")[0], {"HGMMA": 52}),
    (mla_decode_cuda.KERNEL, latent_decode(128, cache="e4m3", topk=128)[0], {"HGMMA": 52}),
    (mla_decode_cuda.COMBINE, latent_decode(128)[1], {}),
]


def op_kernels() -> list[CudaKernel]:
    """Every CUDA kernel of an op: those that files in folders `kernels/sm<number>` declare."""
    source = Path(tilewright.__file__).parent
    files = sorted(source.glob("ops/*/kernels/sm*/*.py"))
    modules = [import_module(".".join(("tilewright", *f.relative_to(source).with_suffix("").parts))) for f in files]
    found = {id(value): value for each in modules for value in vars(each).values() if isinstance(value, CudaKernel)}
    return list(found.values())


def instance_name(value: object) -> str | None:
    return value.entry if hasattr(value, "entry") else "-".join(map(str, value)) if isinstance(value, tuple) else ""


def disassembler() -> Path:
    """cuobjdump, or a skip."""
    found = find_tool("cuobjdump")
    if found is None:
        pytest.skip("needs cuobjdump, of the CUDA toolkit or Triton")
    return found
