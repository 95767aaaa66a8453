"""Problems on which `apply_rope` is measured and checked."""

import torch

from tilewright.dispatch import Workload

_LLAMA_8B = {"H": 32, "H_kv": 8, "D": 128}
_SMALL = {"B": 2, "S": 5, "H": 4, "H_kv": 2, "D": 64}
_PACKED = {"T": 23, "H": 4, "H_kv": 2, "D": 64}
WORKLOADS = (
    Workload("llama8b_1x8k", {"B": 1, "S": 8192, **_LLAMA_8B}),
    Workload("llama8b_4x2k", {"B": 4, "S": 2048, **_LLAMA_8B}),
    Workload("llama8b_packed", {"T": 8192, "positions": 8200, **_LLAMA_8B}),
    Workload("qwen7b_4x2k", {"B": 4, "S": 2048, "H": 28, "H_kv": 4, "D": 128}),
    Workload("llama1b_4x2k", {"B": 4, "S": 2048, "H": 32, "H_kv": 8, "D": 64}),
    Workload("llama1b_1x512", {"B": 1, "S": 512, "H": 32, "H_kv": 8, "D": 64}),
    Workload("phi2_1x256", {"B": 1, "S": 256, "H": 32, "H_kv": 32, "D": 80, "R": 32}),
    Workload("phi2_4x2k", {"B": 4, "S": 2048, "H": 32, "H_kv": 32, "D": 80, "R": 32}),
    Workload("glm9b_1x8k", {"B": 1, "S": 8192, "H": 32, "H_kv": 2, "D": 128, "R": 64, "interleaved": True}),
    *(Workload(f"decode_{b}", {"B": b, "S": 1, **_LLAMA_8B}, directions=("fwd",)) for b in (1, 16, 64)),
)
CPU_WORKLOADS = (Workload("small", {"B": 1, "S": 512, "H": 8, "H_kv": 2, "D": 64}, (torch.bfloat16, torch.float32)),)
EDGE_CASES = (
    Workload("decode: one token", {**_SMALL, "B": 1, "S": 1}),
    Workload("decode_batch: all tokens in the batch", {**_SMALL, "B": 5, "S": 1, "tables": "each"}),
    Workload("odd_s: the last tokens are masked", {**_SMALL, "S": 13, "D": 32}),
    Workload("odd_heads: the last heads are masked", {**_SMALL, "H": 11, "H_kv": 3, "D": 32}),
    Workload("mqa: one key head", {**_SMALL, "H": 6, "H_kv": 1}),
    Workload("one_head: its stride does not tell the layout of k", {**_SMALL, "H": 1, "H_kv": 3, "layout": "fused"}),
    Workload("contiguous: by head, not by token", {**_SMALL, "layout": "contiguous"}),
    Workload("fused: slices of one projection", {**_SMALL, "layout": "fused"}),
    Workload("own_tables: each sequence its own", {**_SMALL, "tables": "each"}),
    Workload("d_80: halves are no power of two", {**_SMALL, "D": 80}),
    Workload("d_96: the same, three quarters full", {**_SMALL, "D": 96}),
    Workload("partial: the rest is copied", {**_SMALL, "D": 80, "R": 32}),
    Workload("r_10: halves are not aligned", {**_SMALL, "D": 16, "R": 10}),
    Workload("r_2: a single pair", {**_SMALL, "D": 8, "R": 2}),
    Workload("interleaved: pairs are neighbours", {**_SMALL, "interleaved": True}),
    Workload("interleaved_partial: with a rest", {**_SMALL, "D": 48, "R": 24, "interleaved": True}),
    Workload("half_tables: one column a pair", {**_SMALL, "tables": "half"}),
    Workload("float32_tables: float32 arithmetic", {**_SMALL, "table_dtype": torch.float32}),
    Workload(
        "cohere: every second column of float32 tables",
        {**_SMALL, "tables": "doubled", "interleaved": True, "table_dtype": torch.float32},
    ),
    Workload("positions: rows of a table", {**_SMALL, "positions": 37}),
    Workload("packed: sequences end to end", {**_PACKED, "positions": 37}),
    Workload("packed_rows: a row a token", {**_PACKED, "R": 32}),
    Workload("empty: no sequences", {**_SMALL, "B": 0}),
)
