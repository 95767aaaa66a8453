"""What the bench measures.  `params` of a row: N states of B, H, S, D, and their form (see `samples.inputs`)."""

import torch

from tilewright.dispatch import Workload

_LLAMA = {"H": 32, "D": 128}

WORKLOADS = (
    # two blocks of keys, as a step of ring attention has them in training
    Workload("two_blocks_8k", {"N": 2, "B": 1, "S": 8192, **_LLAMA}),
    Workload("two_blocks_16k_d64", {"N": 2, "B": 1, "H": 64, "S": 16384, "D": 64}),
    Workload("eight_blocks_8k", {"N": 8, "B": 1, "S": 8192, **_LLAMA}),
    # the sum so far in float32 and the next block in bf16
    Workload("ring_step_8k", {"N": 2, "B": 1, "S": 8192, **_LLAMA, "form": "ring"}, directions=("fwd",)),
    # a prefix that a batch of decoding sequences shares, and the rest of each
    *(
        Workload(f"cascade_b{b}", {"N": 2, "B": b, "S": 1, **_LLAMA, "form": "pair"}, directions=("fwd",))
        for b in (16, 64, 256)
    ),
    # parts of a long cache, in float32
    *(
        Workload(f"split_kv_b{b}_n{n}", {"N": n, "B": b, "S": 1, **_LLAMA, "form": "parts"}, directions=("fwd",))
        for b, n in ((1, 32), (8, 16), (64, 4))
    ),
    # the same of latent attention
    Workload(
        "split_latent_b64_n4", {"N": 4, "B": 64, "H": 128, "S": 1, "D": 512, "form": "parts"}, directions=("fwd",)
    ),
)
CPU_WORKLOADS = (Workload("small", {"N": 2, "B": 1, "H": 8, "S": 256, "D": 64}, (torch.bfloat16, torch.float32)),)
