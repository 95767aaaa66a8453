"""The public ops.  Each is a function; its contract, reference and backends live in the folder of its name.

This module is an index: an op is imported when it is first used, so that `import tilewright.ops` costs the same however
many there are.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilewright import catalogue
from tilewright.ops import torch_ops

if TYPE_CHECKING:
    from tilewright.ops.activation.geglu import geglu
    from tilewright.ops.activation.gelu_and_mul import gelu_and_mul
    from tilewright.ops.activation.relu2 import relu2
    from tilewright.ops.activation.silu_and_mul import silu_and_mul
    from tilewright.ops.activation.silu_and_mul_fp8 import silu_and_mul_fp8
    from tilewright.ops.activation.swiglu import swiglu
    from tilewright.ops.activation.swiglu_fp8 import swiglu_fp8
    from tilewright.ops.activation.swigluoai_and_mul import swigluoai_and_mul
    from tilewright.ops.attention.fmha import fmha
    from tilewright.ops.attention.fmha_decode import fmha_decode
    from tilewright.ops.attention.fmha_dropout import fmha_dropout
    from tilewright.ops.attention.fmha_fp8 import fmha_fp8
    from tilewright.ops.attention.fmha_paged import fmha_paged
    from tilewright.ops.attention.fmha_varlen import fmha_varlen
    from tilewright.ops.attention.merge_states import merge_states
    from tilewright.ops.attention.mla import mla
    from tilewright.ops.attention.mla_decode import mla_decode
    from tilewright.ops.gemm.bmm import bmm
    from tilewright.ops.gemm.gated_mlp import gated_mlp
    from tilewright.ops.gemm.group_gemm import group_gemm
    from tilewright.ops.gemm.grouped_matmul import grouped_matmul
    from tilewright.ops.gemm.groups_of_rows import groups_of_rows
    from tilewright.ops.gemm.int8_matmul import int8_matmul
    from tilewright.ops.gemm.k_grouped_matmul import k_grouped_matmul
    from tilewright.ops.gemm.masked_matmul import masked_matmul
    from tilewright.ops.gemm.matmul import matmul
    from tilewright.ops.gemm.scaled_matmul import scaled_matmul
    from tilewright.ops.gemm.scaled_matmul_fp8 import scaled_matmul_fp8
    from tilewright.ops.gemm.splitk_reduce import splitk_reduce
    from tilewright.ops.gemm.symmetric_matmul import symmetric_matmul
    from tilewright.ops.kvcache.kv_append_ import kv_append_
    from tilewright.ops.kvcache.kv_block_table import kv_block_table
    from tilewright.ops.kvcache.kv_copy_pages_ import kv_copy_pages_
    from tilewright.ops.kvcache.kv_gather import kv_gather
    from tilewright.ops.kvcache.mla_kv_append_ import mla_kv_append_
    from tilewright.ops.kvcache.rope_kv_append_ import rope_kv_append_
    from tilewright.ops.loss.cross_entropy import cross_entropy
    from tilewright.ops.loss.jsd import jsd
    from tilewright.ops.loss.kl_div import kl_div
    from tilewright.ops.loss.linear_cross_entropy import linear_cross_entropy
    from tilewright.ops.loss.linear_jsd import linear_jsd
    from tilewright.ops.moe.fused_moe import fused_moe
    from tilewright.ops.moe.fused_moe_bias import fused_moe_bias
    from tilewright.ops.moe.fused_moe_fp8 import fused_moe_fp8
    from tilewright.ops.moe.moe_align import moe_align
    from tilewright.ops.moe.moe_permute import moe_permute
    from tilewright.ops.moe.moe_unpermute import moe_unpermute
    from tilewright.ops.moe.topk_sigmoid import topk_sigmoid
    from tilewright.ops.moe.topk_softmax import topk_softmax
    from tilewright.ops.norm.add_rms_norm import add_rms_norm
    from tilewright.ops.norm.add_rms_norm_fp8 import add_rms_norm_fp8
    from tilewright.ops.norm.group_norm import group_norm
    from tilewright.ops.norm.layer_norm import layer_norm
    from tilewright.ops.norm.rms_norm import rms_norm
    from tilewright.ops.norm.rms_norm_fp8 import rms_norm_fp8
    from tilewright.ops.norm.rms_norm_gated import rms_norm_gated
    from tilewright.ops.optim.adamw import adamw
    from tilewright.ops.optim.adamw_8bit import adamw_8bit
    from tilewright.ops.optim.grad_norm import grad_norm
    from tilewright.ops.quant.cast_to_blocks import cast_to_blocks
    from tilewright.ops.quant.dequantize import dequantize
    from tilewright.ops.quant.dequantize_blocks import dequantize_blocks
    from tilewright.ops.quant.hadamard_transform import hadamard_transform
    from tilewright.ops.quant.per_block_cast_to_fp8 import per_block_cast_to_fp8
    from tilewright.ops.quant.per_channel_cast_to_fp8 import per_channel_cast_to_fp8
    from tilewright.ops.quant.per_tensor_cast_to_fp8 import per_tensor_cast_to_fp8
    from tilewright.ops.quant.per_token_cast_to_fp8 import per_token_cast_to_fp8
    from tilewright.ops.quant.per_token_cast_to_int8 import per_token_cast_to_int8
    from tilewright.ops.reduction.dropout import dropout
    from tilewright.ops.reduction.log_softmax import log_softmax
    from tilewright.ops.reduction.logsumexp import logsumexp
    from tilewright.ops.reduction.masked_softmax import masked_softmax
    from tilewright.ops.reduction.softmax import softmax
    from tilewright.ops.reduction.sparsemax import sparsemax
    from tilewright.ops.rope.apply_rope import apply_rope
    from tilewright.ops.rope.qk_norm_rope import qk_norm_rope
    from tilewright.ops.sampling.apply_penalties import apply_penalties
    from tilewright.ops.sampling.greedy import greedy
    from tilewright.ops.sampling.sample import sample
    from tilewright.ops.sampling.top_k import top_k
    from tilewright.ops.sampling.verify_chain import verify_chain
    from tilewright.ops.sampling.verify_tree import verify_tree
    from tilewright.ops.weight_only.block_matmul import block_matmul
    from tilewright.ops.weight_only.dequantize_weight import dequantize_weight
    from tilewright.ops.weight_only.quantize_weight import quantize_weight
    from tilewright.ops.weight_only.weight_only_matmul import weight_only_matmul

__all__ = [
    "adamw",
    "adamw_8bit",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "apply_penalties",
    "apply_rope",
    "block_matmul",
    "bmm",
    "cast_to_blocks",
    "cross_entropy",
    "dequantize",
    "dequantize_blocks",
    "dequantize_weight",
    "dropout",
    "fmha",
    "fmha_decode",
    "fmha_dropout",
    "fmha_fp8",
    "fmha_paged",
    "fmha_varlen",
    "fused_moe",
    "fused_moe_bias",
    "fused_moe_fp8",
    "gated_mlp",
    "geglu",
    "gelu_and_mul",
    "grad_norm",
    "greedy",
    "group_gemm",
    "group_norm",
    "grouped_matmul",
    "groups_of_rows",
    "hadamard_transform",
    "int8_matmul",
    "jsd",
    "k_grouped_matmul",
    "kl_div",
    "kv_append_",
    "kv_block_table",
    "kv_copy_pages_",
    "kv_gather",
    "layer_norm",
    "linear_cross_entropy",
    "linear_jsd",
    "log_softmax",
    "logsumexp",
    "masked_matmul",
    "masked_softmax",
    "matmul",
    "merge_states",
    "mla",
    "mla_decode",
    "mla_kv_append_",
    "moe_align",
    "moe_permute",
    "moe_unpermute",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_tensor_cast_to_fp8",
    "per_token_cast_to_fp8",
    "per_token_cast_to_int8",
    "qk_norm_rope",
    "quantize_weight",
    "relu2",
    "rms_norm",
    "rms_norm_fp8",
    "rms_norm_gated",
    "rope_kv_append_",
    "sample",
    "scaled_matmul",
    "scaled_matmul_fp8",
    "silu_and_mul",
    "silu_and_mul_fp8",
    "softmax",
    "sparsemax",
    "splitk_reduce",
    "swiglu",
    "swiglu_fp8",
    "swigluoai_and_mul",
    "symmetric_matmul",
    "top_k",
    "topk_sigmoid",
    "topk_softmax",
    "verify_chain",
    "verify_tree",
    "weight_only_matmul",
]

_FAMILIES = {
    "activation": (
        "geglu",
        "gelu_and_mul",
        "relu2",
        "silu_and_mul",
        "silu_and_mul_fp8",
        "swiglu",
        "swiglu_fp8",
        "swigluoai_and_mul",
    ),
    "attention": (
        "fmha",
        "fmha_decode",
        "fmha_dropout",
        "fmha_fp8",
        "fmha_paged",
        "fmha_varlen",
        "merge_states",
        "mla",
        "mla_decode",
    ),
    "gemm": (
        "bmm",
        "gated_mlp",
        "group_gemm",
        "grouped_matmul",
        "groups_of_rows",
        "int8_matmul",
        "k_grouped_matmul",
        "masked_matmul",
        "matmul",
        "scaled_matmul",
        "scaled_matmul_fp8",
        "splitk_reduce",
        "symmetric_matmul",
    ),
    "kvcache": ("kv_append_", "kv_block_table", "kv_copy_pages_", "kv_gather", "mla_kv_append_", "rope_kv_append_"),
    "loss": ("cross_entropy", "jsd", "kl_div", "linear_cross_entropy", "linear_jsd"),
    "moe": (
        "fused_moe",
        "fused_moe_bias",
        "fused_moe_fp8",
        "moe_align",
        "moe_permute",
        "moe_unpermute",
        "topk_sigmoid",
        "topk_softmax",
    ),
    "norm": (
        "add_rms_norm",
        "add_rms_norm_fp8",
        "group_norm",
        "layer_norm",
        "rms_norm",
        "rms_norm_fp8",
        "rms_norm_gated",
    ),
    "optim": ("adamw", "adamw_8bit", "grad_norm"),
    "quant": (
        "cast_to_blocks",
        "dequantize",
        "dequantize_blocks",
        "hadamard_transform",
        "per_block_cast_to_fp8",
        "per_channel_cast_to_fp8",
        "per_tensor_cast_to_fp8",
        "per_token_cast_to_fp8",
        "per_token_cast_to_int8",
    ),
    "reduction": ("dropout", "log_softmax", "logsumexp", "masked_softmax", "softmax", "sparsemax"),
    "rope": ("apply_rope", "qk_norm_rope"),
    "sampling": ("apply_penalties", "greedy", "sample", "top_k", "verify_chain", "verify_tree"),
    "weight_only": ("block_matmul", "dequantize_weight", "quantize_weight", "weight_only_matmul"),
}
_MODULES = {op: f"{__name__}.{family}.{op}" for family, ops in _FAMILIES.items() for op in ops}

catalogue.announce(_MODULES)
torch_ops.install()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        catalogue.load(name)
        value = getattr(import_module(_MODULES[name]), name)
    elif name in _FAMILIES:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_FAMILIES})
