"""Problems on which `qk_norm_rope` is measured and checked."""

import torch

from tilewright.dispatch import Workload

_QWEN3_8B = {"H": 32, "H_kv": 8, "D": 128}
_GEMMA3_12B = {"H": 16, "H_kv": 8, "D": 256, "offset": 1.0}
_SMALL = {"B": 2, "S": 5, "H": 4, "H_kv": 2, "D": 32}
WORKLOADS = (
    Workload("qwen3_8b_1x4k", {"B": 1, "S": 4096, **_QWEN3_8B}),
    Workload("qwen3_8b_packed", {"T": 8192, "positions": 8200, **_QWEN3_8B}),
    Workload("qwen3_30b_1x4k", {"B": 1, "S": 4096, "H": 32, "H_kv": 4, "D": 128}),
    Workload("gemma3_12b_1x4k", {"B": 1, "S": 4096, **_GEMMA3_12B}),
    Workload("glm45_1x4k", {"B": 1, "S": 4096, "H": 96, "H_kv": 8, "D": 128, "R": 64}),
    Workload("qwen3_8b_decode_16", {"B": 16, "S": 1, **_QWEN3_8B}, directions=("fwd",)),
    Workload("gemma3_12b_decode_1", {"B": 1, "S": 1, **_GEMMA3_12B}, directions=("fwd",)),
)
CPU_WORKLOADS = (Workload("small", {"B": 1, "S": 512, "H": 8, "H_kv": 2, "D": 64}, (torch.bfloat16, torch.float32)),)
EDGE_CASES = (
    Workload("decode: one token a sequence, each its own table", {**_SMALL, "B": 5, "S": 1, "tables": "each"}),
    Workload("odd: the last tokens and heads are masked", {**_SMALL, "S": 13, "H": 11, "H_kv": 3, "eps": 0.0}),
    Workload("gemma: offset 1 in float32, by head", {**_SMALL, "offset": 1.0, "layout": "contiguous"}),
    Workload(
        "mixed: float32 weights promote the result, one column a pair",
        {**_SMALL, "H_kv": 1, "D": 6, "weight_dtype": torch.float32, "table_dtype": torch.float32, "tables": "half"},
    ),
    Workload("partial: the rest is normalised alone", {**_SMALL, "D": 80, "R": 32}),
    Workload(
        "interleaved: pairs are neighbours, one rounding, slices of one projection",
        {**_SMALL, "D": 48, "R": 24, "interleaved": True, "fp32_weight": True, "layout": "fused"},
    ),
    Workload("packed: rows of a table", {"T": 23, "H": 4, "H_kv": 2, "D": 64, "positions": 37, "eps": 0.5}),
    Workload("empty: no sequences", {**_SMALL, "B": 0}),
)
