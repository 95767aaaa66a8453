"""Factors of an adapter in the form of PEFT: adapter_config.json and adapter_model.safetensors."""

import json
import re
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tilewright.errors import InputError

Source = str | Path | tuple[Mapping[str, Any], Mapping[str, Tensor]]
"""A folder with both files, or what they hold: the config and the tensors by name."""

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields of other computations: values that leave plain LoRA
    "bias": ("none",),
    "lora_bias": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
}


class Factors(NamedTuple):
    """a: (r, K)   b: (N, r)   scale: of their product."""

    a: Tensor
    b: Tensor
    scale: float


def factors(name: str, source: Source) -> dict[str, Factors]:
    """Factors of the adapter `name`, by the path of the layer that they change.

    Raises InputError for files that are missing, and for what is not plain LoRA of linear layers.
    """
    config, tensors = source if isinstance(source, tuple) else _read(name, Path(source))
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise InputError(f"Engine: adapter {name!r} is of type {kind}; an engine takes LORA.")
    for field, neutral in _NEUTRAL.items():
        if config.get(field, neutral[0]) not in neutral:
            raise InputError(f"Engine: adapter {name!r} has {field}={config[field]!r}, which an engine does not apply.")
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        parts = _TENSOR.fullmatch(key)
        if parts is None or tensor.dim() != 2:
            raise InputError(f"Engine: adapter {name!r} has {key}, which is no factor of a linear layer.")
        halves.setdefault(parts[1], {})[parts[2]] = tensor
    if not halves:
        raise InputError(f"Engine: adapter {name!r} has no factors.")
    return {path: _factors(name, path, its, config) for path, its in halves.items()}


def _factors(name: str, path: str, halves: Mapping[str, Tensor], config: Mapping[str, Any]) -> Factors:
    rank, alpha = _number(config, "rank_pattern", "r", path), _number(config, "alpha_pattern", "lora_alpha", path)
    if set(halves) != {"A", "B"} or halves["A"].shape[0] != rank or halves["B"].shape[1] != rank:
        shapes = ", ".join(f"{half} {tuple(tensor.shape)}" for half, tensor in sorted(halves.items()))
        raise InputError(f"Engine: adapter {name!r} has {shapes} for {path}; it needs A ({rank}, K) and B (N, {rank}).")
    return Factors(halves["A"], halves["B"], alpha / (sqrt(rank) if config.get("use_rslora") else rank))


def _number(config: Mapping[str, Any], patterns: str, default: str, path: str) -> Any:
    """The number of the first pattern that is the end of `path`, or else the default's."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", path):
            return value
    return config[default]


def _read(name: str, folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    from safetensors.torch import load_file

    config, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for file in (config, tensors):
        if not file.is_file():
            raise InputError(f"Engine: adapter {name!r} needs {file}, which does not exist.")
    return json.loads(config.read_text(encoding="utf-8")), load_file(tensors)
