"""How the problems of each op are drawn from a model: layers, rows, lengths, dtypes, options.

Every recipe gets a `Draw` and a `Model` and returns `Sizes`, or None where the model has no such part.  What the sizes
mean is said by `inputs` of the op's contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from any_size_activation import activation, activation_fp8, gated_mlp, relu2, swigluoai
from any_size_attention import (
    fmha,
    fmha_decode,
    fmha_dropout,
    fmha_fp8,
    fmha_paged,
    fmha_varlen,
    merge_states,
    mla,
    mla_decode,
)
from any_size_draw import BF16, FP8, FP32, TRAINING_ROWS, Draw, Model, Recipe, Sizes
from any_size_kvcache import kv_append, kv_block_table, kv_copy_pages, kv_gather, mla_kv_append, rope_kv_append
from any_size_lowbits import (
    block_matmul,
    cast_to_blocks,
    dequantize_blocks,
    dequantize_weight,
    hadamard_transform,
    int8_matmul,
    per_token_cast_to_int8,
    quantize_weight,
    weight_only_matmul,
)
from any_size_moe import fused_moe, fused_moe_bias, moe_align, moved_rows, topk_sigmoid, topk_softmax
from any_size_norms import group_norm, layer_norm, norm, norm_fp8, rms_norm_gated
from any_size_optim import adamw, adamw_8bit, grad_norm, symmetric_matmul
from any_size_parts import decoded, expert, floating, half, layer, part_of, product_cost, tokens
from any_size_rope import apply_rope, qk_norm_rope
from any_size_sampling import apply_penalties, greedy, sample, top_k, verify_chain, verify_tree


def matmul(draw: Draw, model: Model) -> Sizes:
    """Forward nt, also with an epilogue; the gradient of x, nn; that of w, tn, also added to a float32 one; float8."""
    part, n, k = layer(draw, model)
    m, kind = tokens(draw), draw.below(100)
    dtype = FP8 if kind < 8 else floating(draw)
    if kind < 8:
        return Sizes(part, {"M": m, "N": n, "K": k, "out_dtype": BF16}, FP8, **product_cost(m, n, k))
    if kind < 22 and m >= TRAINING_ROWS:
        return Sizes(f"{part}_dgrad", {"M": m, "N": k, "K": n, "layout": "nn"}, dtype, **product_cost(m, n, k))
    if kind < 36 and m >= TRAINING_ROWS:
        params: dict[str, Any] = {"M": n, "N": k, "K": m, "layout": "tn"}
        adds = draw.chance(0.5)
        if adds:
            params |= {"c": True, "out_dtype": FP32}
        return Sizes(f"{part}_wgrad", params, dtype, into="c" if adds else None, **product_cost(m, n, k))
    options: dict[str, Any] = {}
    if part in ("qkv", "up", "down") and model.qkv_bias:
        options["bias"] = True
    if part == "up":
        options["activation"] = "gelu"
    if part == "gate_up" and draw.chance(0.3):
        options["activation"] = "swiglu"
    if part == "lm_head" and dtype != FP32 and draw.chance(0.3):
        options["out_dtype"] = FP32
    return Sizes(part, {"M": m, "N": n, "K": k, **options}, dtype, **product_cost(m, n, k))


def bmm(draw: Draw, model: Model) -> Sizes:
    """Absorbed latent attention, scores and values of attention, experts with equally many rows."""
    heads, d, m = part_of(draw, model.heads), model.head_dim, tokens(draw)
    kinds: list[tuple[str, int, int, int, int, str]] = [
        ("scores", heads, m, m, d, "nt"),
        ("values", heads, m, d, m, "nn"),
    ]
    if model.kv_lora:
        kinds += [("absorb", heads, m, model.kv_lora, d, "nn"), ("latent_values", heads, m, d, model.kv_lora, "nt")]
    if (found := expert(draw, model)) is not None:
        part, groups, n, k = found
        kinds += [(part, min(groups, 16), m, n, k, "nt")] * 2
    part, batch, rows, n, k, layout = draw.pick(kinds)
    params = {"B": batch, "M": rows, "N": n, "K": k, "layout": layout}
    return Sizes(part, params, floating(draw), **product_cost(rows, n, k, batch))


def splitk_reduce(draw: Draw, model: Model) -> Sizes:
    """Partial sums of a product of few rows; they are float32."""
    part, n, _ = layer(draw, model)
    parts, m = draw.pick((2, 3, 4, 6, 8, 16)), decoded(draw)
    return Sizes(part, {"S": parts, "M": m, "N": n}, half(draw), elements=2 * (parts + 1) * m * n)


def scaled_matmul(draw: Draw, model: Model) -> Sizes:
    """Activations times weights, 1x128 by 128x128; weight gradients, 1x128 of both, in float32; rows; tensors."""
    part, n, k = layer(draw, model)
    m, kind = tokens(draw), draw.below(100)
    sizes: dict[str, Any] = {"M": m, "N": n, "K": k, "binary": True}
    if kind < 15 and m >= TRAINING_ROWS:
        sizes |= {"M": n, "N": k, "K": m, "scaling": "token_token", "out_dtype": FP32}
        return Sizes(f"{part}_wgrad", sizes, FP8, **product_cost(m, n, k))
    if kind < 30:
        sizes["scaling"] = draw.pick(("row", "tensor"))
    if part == "gate_up" and draw.chance(0.3):
        sizes["activation"] = "swiglu"
    return Sizes(part, sizes, FP8, **product_cost(m, n, k))


def scaled_matmul_fp8(draw: Draw, model: Model) -> Sizes:
    """A layer whose result the next layer reads in float8."""
    part, n, k = layer(draw, model)
    m = tokens(draw)
    sizes: dict[str, Any] = {"M": m, "N": n, "K": k, "binary": True}
    if part == "gate_up":
        sizes["activation"] = "swiglu"
    return Sizes(part, sizes, FP8, **product_cost(m, n, k))


def _expert_rows(draw: Draw, model: Model) -> int:
    """Rows that an expert gets on average."""
    return max(tokens(draw) * model.top_k // model.experts, 1)


def grouped_matmul(draw: Draw, model: Model) -> Sizes | None:
    """Rows of tokens by expert: forward, the gradient of x, float8."""
    if (found := expert(draw, model)) is None:
        return None
    part, groups, n, k = found
    m, kind = _expert_rows(draw, model), draw.below(100)
    sizes: dict[str, Any] = {"G": groups, "M": m, "N": n, "K": k, "split": draw.pick(("random", "random", "even"))}
    work = {"flops": 2.0 * groups * m * n * k, "elements": groups * (m * k + n * k + m * n)}
    if kind < 35:
        return Sizes(part, {**sizes, "scaling": 2}, FP8, **work)
    if kind < 50 and groups * m >= TRAINING_ROWS:
        return Sizes(f"{part}_dgrad", {**sizes, "N": k, "K": n, "layout": "nn"}, half(draw), **work)
    if part == "experts_gate_up" and draw.chance(0.3):
        return Sizes(part, {**sizes, "activation": "swiglu"}, half(draw), **work)
    return Sizes(part, sizes, floating(draw), trained=groups * m >= TRAINING_ROWS, **work)


def masked_matmul(draw: Draw, model: Model) -> Sizes | None:
    """A matrix of rows for every expert: decoding with graphs."""
    if (found := expert(draw, model)) is None:
        return None
    part, groups, n, k = found
    m = draw.pick((1, 2, 4, 8, 16, 20, 37, 64, 128, 333, 1024))
    sizes: dict[str, Any] = {"G": groups, "M": m, "N": n, "K": k}
    work = {"flops": 2.0 * groups * m * n * k, "elements": groups * (m * k + n * k + m * n)}
    return (
        Sizes(part, {**sizes, "scaling": 2}, FP8, **work)
        if draw.chance(0.5)
        else Sizes(part, sizes, half(draw), **work)
    )


def k_grouped_matmul(draw: Draw, model: Model) -> Sizes | None:
    """Weight gradients of experts."""
    if (found := expert(draw, model)) is None:
        return None
    part, groups, n, k = found
    rows = _expert_rows(draw, model)
    work = {"flops": 2.0 * groups * rows * n * k, "elements": groups * (rows * (n + k) + 2 * n * k)}
    sizes: dict[str, Any] = {"G": groups, "M": n, "N": k, "K": rows, "split": draw.pick(("random", "even"))}
    if draw.chance(0.35):
        sizes |= {"K": -(-rows // 128) * 128, "scaling": 3, "layout": "nt"}
        work["flops"] = 2.0 * groups * sizes["K"] * n * k
        return Sizes(f"{part}_wgrad", sizes, FP8, **work)
    return Sizes(f"{part}_wgrad", {**sizes, "out_dtype": draw.pick((BF16, None))}, half(draw), **work)


def group_gemm(draw: Draw, model: Model) -> Sizes:
    """Several layers of a model at once."""
    m = tokens(draw)
    shapes = [layer(draw, model)[1:] for _ in range(draw.between(2, 8))]
    work = {
        "flops": sum(2.0 * m * n * k for n, k in shapes),
        "elements": sum(m * k + n * k + m * n for n, k in shapes),
    }
    sizes = tuple((m, n, k) for n, k in shapes)
    return Sizes(f"{len(sizes)}_layers", {"sizes": sizes, "layout": "nt"}, half(draw), **work)


def groups_of_rows(draw: Draw, model: Model) -> Sizes | None:
    """The group of each row, after tokens were sorted by expert."""
    if not model.experts:
        return None
    m = _expert_rows(draw, model)
    return Sizes("experts", {"G": model.experts, "M": m}, torch.int32, elements=model.experts * (m + 2))


def softmax(draw: Draw, model: Model) -> Sizes:
    """Logits of a vocabulary, or of the experts."""
    part, n = ("router", model.experts) if model.experts and draw.chance(0.3) else ("vocabulary", model.vocab)
    m = tokens(draw)
    n = part_of(draw, n) if part == "vocabulary" else n
    return Sizes(part, {"M": m, "N": n}, floating(draw), 2 * m * n, trained=m >= TRAINING_ROWS)


def masked_softmax(draw: Draw, model: Model) -> Sizes:
    """Scores of one sequence, causal or with keys that are padding."""
    heads, n = part_of(draw, model.heads), draw.pick((77, 512, 1000, 2048))
    options = draw.pick(({"causal": True}, {"mask": "keys"}))
    sizes = {"B": 1, "H": heads, "M": n, "N": n, **options}
    return Sizes("scores", sizes, floating(draw), 3 * heads * n * n, trained=n >= TRAINING_ROWS)


def dropout(draw: Draw, model: Model) -> Sizes:
    """Hidden states before they are added to the residual stream."""
    m, n = tokens(draw), model.hidden
    options = draw.pick(({}, {"residual": True}))
    return Sizes("hidden", {"M": m, "N": n, "p": 0.1, **options}, floating(draw), 3 * m * n, trained=m >= TRAINING_ROWS)


def cross_entropy(draw: Draw, model: Model) -> Sizes | None:
    """The loss over a vocabulary, also smoothed, with a z-loss, and of capped logits."""
    m = tokens(draw)
    options = draw.pick(({}, {}, {"label_smoothing": 0.1}, {"z_loss": 1e-4}, {"softcap": 30.0}))
    params = {"M": m, "N": model.vocab, "ignored": draw.pick((0.0, 0.3)), **options}
    return Sizes("vocabulary", params, floating(draw), 2 * m * model.vocab, trained=m >= TRAINING_ROWS)


def jsd(draw: Draw, model: Model) -> Sizes | None:
    """The divergence of a student's logits from a teacher's, of each kind, and in part ignored."""
    m = tokens(draw)
    kind = draw.pick(({"beta": 0.0}, {"beta": 0.5}, {"beta": 1.0}, {"kind": "tvd"}))
    params = {"M": m, "N": model.vocab, **kind, **draw.pick(({}, {"ignored": 0.3}))}
    return Sizes("vocabulary", params, floating(draw), 4 * m * model.vocab, trained=m >= TRAINING_ROWS)


def kl_div(draw: Draw, model: Model) -> Sizes | None:
    """The divergence of log-probabilities over a vocabulary."""
    m = tokens(draw)
    params = {"M": m, "N": model.vocab, "reduction": "batchmean", "log_target": draw.pick((False, True))}
    return Sizes("vocabulary", params, floating(draw), 4 * m * model.vocab, trained=m >= TRAINING_ROWS)


def linear_cross_entropy(draw: Draw, model: Model) -> Sizes | None:
    """The last layer and its loss."""
    m = min(tokens(draw), 8192)
    sizes = {"M": m, "N": model.vocab, "K": model.hidden}
    return Sizes("lm_head", sizes, half(draw), trained=m >= TRAINING_ROWS, **product_cost(m, model.vocab, model.hidden))


def linear_jsd(draw: Draw, model: Model) -> Sizes | None:
    """The last layers of a student and of a teacher of its width, and their divergence."""
    m = min(tokens(draw), 8192)
    sizes = {"M": m, "N": model.vocab, "K": model.hidden}
    cost = product_cost(m, model.vocab, 2 * model.hidden)
    return Sizes("lm_heads", sizes, half(draw), trained=m >= TRAINING_ROWS, **cost)


def token_cast(draw: Draw, model: Model) -> Sizes:
    """Activations before a layer, or between the layers of an MLP."""
    m, n = tokens(draw), draw.pick((model.hidden, part_of(draw, model.intermediate)))
    options = draw.pick(({}, {}, {"ue8m0": True}))
    return Sizes("activations", {"M": m, "N": n, **options}, floating(draw), 2 * m * n)


def tensor_cast(draw: Draw, model: Model) -> Sizes:
    """The same with one scale."""
    m, n = tokens(draw), draw.pick((model.hidden, part_of(draw, model.intermediate)))
    return Sizes("activations", {"M": m, "N": n}, floating(draw), 2 * m * n)


def channel_cast(draw: Draw, model: Model) -> Sizes:
    """The operands of weight gradients, along the tokens."""
    m, n = tokens(draw), draw.pick((model.hidden, part_of(draw, model.intermediate)))
    options = draw.pick(({"transpose": True}, {"transpose": True}, {}))
    return Sizes("activations", {"M": m, "N": n, **options}, floating(draw), 2 * m * n)


def block_cast(draw: Draw, model: Model) -> Sizes:
    """Weights of a layer, or of the experts."""
    part, n, k = layer(draw, model)
    options = draw.pick(({}, {}, {"transpose": True}, {"ue8m0": True}))
    if (found := expert(draw, model)) is not None and draw.chance(0.5):
        part, groups, n, k = found
        return Sizes(part, {"B": groups, "M": n, "N": k, **options}, floating(draw), 2 * groups * n * k)
    return Sizes(part, {"M": n, "N": k, **options}, floating(draw), 2 * n * k)


def dequantize(draw: Draw, model: Model) -> Sizes:
    """Activations and weights back to a wider dtype."""
    layout = draw.pick(("token", "block", "channel", "row", "tensor", "packed"))
    part, n, k = layer(draw, model)
    m = n if layout == "block" else tokens(draw)
    return Sizes(f"{part}_{layout}", {"M": m, "N": k, "layout": layout}, floating(draw), 3 * m * k)


RECIPES: Mapping[str, tuple[int, Recipe]] = {
    "adamw": (1, adamw),
    "adamw_8bit": (1, adamw_8bit),
    "add_rms_norm": (2, norm(4)),
    "add_rms_norm_fp8": (1, norm_fp8),
    "apply_penalties": (1, apply_penalties),
    "apply_rope": (2, apply_rope),
    "block_matmul": (1, block_matmul),
    "bmm": (2, bmm),
    "cross_entropy": (2, cross_entropy),
    "cast_to_blocks": (1, cast_to_blocks),
    "dequantize": (1, dequantize),
    "dequantize_blocks": (1, dequantize_blocks),
    "dequantize_weight": (1, dequantize_weight),
    "dropout": (1, dropout),
    "fmha": (6, fmha),
    "fmha_decode": (2, fmha_decode),
    "fmha_dropout": (1, fmha_dropout),
    "fmha_fp8": (2, fmha_fp8),
    "fmha_paged": (2, fmha_paged),
    "fmha_varlen": (3, fmha_varlen),
    "fused_moe": (2, fused_moe),
    "fused_moe_fp8": (1, fused_moe),
    "fused_moe_bias": (1, fused_moe_bias),
    "gated_mlp": (1, gated_mlp),
    "geglu": (1, activation),
    "gelu_and_mul": (1, activation),
    "grad_norm": (1, grad_norm),
    "greedy": (1, greedy),
    "group_gemm": (1, group_gemm),
    "group_norm": (1, group_norm),
    "grouped_matmul": (3, grouped_matmul),
    "groups_of_rows": (1, groups_of_rows),
    "hadamard_transform": (1, hadamard_transform),
    "int8_matmul": (1, int8_matmul),
    "jsd": (1, jsd),
    "k_grouped_matmul": (1, k_grouped_matmul),
    "kl_div": (1, kl_div),
    "kv_append_": (2, kv_append),
    "kv_block_table": (1, kv_block_table),
    "kv_copy_pages_": (1, kv_copy_pages),
    "kv_gather": (1, kv_gather),
    "layer_norm": (1, layer_norm),
    "linear_cross_entropy": (1, linear_cross_entropy),
    "linear_jsd": (1, linear_jsd),
    "log_softmax": (1, softmax),
    "logsumexp": (1, softmax),
    "masked_matmul": (2, masked_matmul),
    "masked_softmax": (1, masked_softmax),
    "matmul": (6, matmul),
    "merge_states": (1, merge_states),
    "mla": (2, mla),
    "mla_decode": (2, mla_decode),
    "mla_kv_append_": (1, mla_kv_append),
    "moe_align": (1, moe_align),
    "moe_permute": (1, moved_rows),
    "moe_unpermute": (1, moved_rows),
    "per_block_cast_to_fp8": (1, block_cast),
    "per_channel_cast_to_fp8": (1, channel_cast),
    "per_tensor_cast_to_fp8": (1, tensor_cast),
    "per_token_cast_to_fp8": (2, token_cast),
    "per_token_cast_to_int8": (1, per_token_cast_to_int8),
    "qk_norm_rope": (2, qk_norm_rope),
    "quantize_weight": (1, quantize_weight),
    "relu2": (1, relu2),
    "rms_norm": (2, norm(2)),
    "rms_norm_fp8": (1, norm_fp8),
    "rms_norm_gated": (1, rms_norm_gated),
    "rope_kv_append_": (2, rope_kv_append),
    "sample": (2, sample),
    "scaled_matmul": (4, scaled_matmul),
    "scaled_matmul_fp8": (1, scaled_matmul_fp8),
    "silu_and_mul": (1, activation),
    "silu_and_mul_fp8": (1, activation_fp8),
    "softmax": (2, softmax),
    "sparsemax": (1, softmax),
    "splitk_reduce": (1, splitk_reduce),
    "swiglu": (1, activation),
    "swiglu_fp8": (1, activation_fp8),
    "swigluoai_and_mul": (1, swigluoai),
    "symmetric_matmul": (1, symmetric_matmul),
    "top_k": (1, top_k),
    "topk_sigmoid": (1, topk_sigmoid),
    "topk_softmax": (1, topk_softmax),
    "verify_chain": (1, verify_chain),
    "verify_tree": (1, verify_tree),
    "weight_only_matmul": (3, weight_only_matmul),
}
"""By op: how often it is drawn in a cycle of all, and its recipe."""
