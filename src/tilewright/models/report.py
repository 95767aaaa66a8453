"""The report of a patch, module by module: replaced, and by what, or left, and why."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Patchable = Literal["norm", "mlp", "rotary", "add_norm", "linear", "attention", "experts", "routers", "loss"]
OPS_OF_KIND: Mapping[Patchable, tuple[str, ...]] = {
    "norm": ("rms_norm", "layer_norm", "rms_norm_gated"),
    "mlp": ("swiglu", "geglu", "silu_and_mul", "gelu_and_mul", "relu2"),
    "rotary": ("apply_rope", "qk_norm_rope"),
    "add_norm": ("add_rms_norm",),
    "linear": ("matmul",),
    "experts": ("fused_moe", "fused_moe_bias"),
    "routers": ("topk_softmax", "topk_sigmoid"),
    "loss": ("linear_cross_entropy",),
    "attention": (),  # a name in the model's configuration: see `attention.choice`
}
"""The names that `patch(ops=)` allows: kinds of modules, and the ops that replace them."""
Kind = Literal[Patchable, "fp8", "quant"]
Status = Literal["replaced", "left"]


@dataclass(frozen=True)
class Row:
    """One module.   text: what runs now if it is replaced, the reason if it is left."""

    path: str
    module_class: str
    kind: Kind
    status: Status
    text: str


@dataclass(frozen=True)
class Report:
    """Rows in the order of `model.named_modules()`."""

    rows: tuple[Row, ...]

    def counts(self, status: Status = "replaced") -> dict[str, int]:
        """Number of modules of each kind with this status; kinds without one are absent."""
        return dict(Counter(row.kind for row in self.rows if row.status == status))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "replaced": self.counts(),
            "left": self.counts("left"),
            "rows": [asdict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        """One line for all layers that share it: `model.layers.*.input_layernorm`, with their number."""
        groups: Counter[tuple[str, ...]] = Counter()
        for row in sorted(self.rows, key=lambda row: row.status != "replaced"):
            pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.path) or "(model)"
            groups[row.status, row.kind, f"{pattern} ({row.module_class})", row.text] += 1
        lines = [(status, f"{n} x {kind}", modules, text) for (status, kind, modules, text), n in groups.items()]
        widths = [max((len(line[column]) for line in lines), default=0) for column in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]])
            for line in lines
        )
