"""What the bench measures: products whose result the next product reads."""

from tilewright.dispatch import Workload
from tilewright.ops.gemm.scaled.workloads import LLAMA_8B, layer

WORKLOADS = (
    *layer("dsv3_7168x2048", 7168, 2048, (16, 4096)),
    *layer("llama8b_gate_up_swiglu", *LLAMA_8B["gate_up"], (1, 64, 4096), activation="swiglu"),
)
CPU_WORKLOADS = (Workload("small", {"M": 64, "N": 512, "K": 512}, directions=("fwd",)),)
