"""The averages of AdamW as states of a parameter: floating-point numbers, or codes of 8 bits with their scales."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.ops.optim.dynamic_map import from_codes, to_codes

FEWEST = 4096
"""Elements of the smallest parameter with averages of 8 bits: others save little (norms, biases)."""

_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


def names_of_averages(state: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the averages that a state has, in the order of the op's arguments."""
    if "exp_avg_codes" in state:
        return tuple(f"{name}_{part}" for name in _SIGNED for part in ("codes", "scale"))
    return tuple(_SIGNED)


def state_dtypes(state_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each state; averages that become codes later are float32."""
    floats = torch.float32 if state_dtype == torch.uint8 else state_dtype
    dtypes = {"step": torch.float32, "master": torch.float32, "seed": torch.int64}
    for name in _SIGNED:
        dtypes |= {name: floats, f"{name}_codes": torch.uint8, f"{name}_scale": torch.float32}
    return dtypes


def complete_averages(p: Tensor, state: dict[str, Any], state_dtype: torch.dtype) -> None:
    """Make the averages of a parameter, 0, if it has none, and convert those that it has to `state_dtype`."""
    has_codes = state_dtype == torch.uint8 and p.numel() >= FEWEST
    floats = state_dtypes(state_dtype)["exp_avg"]
    for name, signed in _SIGNED.items():
        codes, scale = f"{name}_codes", f"{name}_scale"
        if has_codes and codes not in state:
            state[codes], state[scale] = to_codes(state.pop(name, torch.zeros_like(p)), signed)
        elif not has_codes and name not in state:
            state[name] = torch.zeros_like(p, dtype=floats, memory_format=torch.preserve_format)
            if codes in state:
                state[name].copy_(from_codes(state.pop(codes), state.pop(scale), signed))
