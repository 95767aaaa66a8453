"""What `merge_states` refuses before anything is launched, in words."""

import torch

from tilewright.errors import InputError
from tilewright.ops.attention.merge_states.args import MergeStatesArgs

_RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def check(args: MergeStatesArgs) -> None:
    """Raises InputError for raw arguments that cannot run."""
    op, o, other = "merge_states", args.o, args.other
    pairs = [(o, args.lse)]
    if other is not None and args.other_lse is not None:
        pairs.append((other, args.other_lse))
    is_float64 = any(state.dtype == torch.float64 for state, _ in pairs)
    for state, logarithm in pairs:
        if state.dim() != 5 or state.shape[0] == 0 or state.shape[4] == 0 or state.shape[1:] != o.shape[1:]:
            raise InputError(f"{op}: o is {tuple(state.shape)} as (N, B, H, S, D); needs N and D of at least 1.")
        if logarithm.shape != state.shape[:4]:
            raise InputError(f"{op}: lse is {tuple(logarithm.shape)}; needs {tuple(state.shape[:4])}.")
        if logarithm.dtype != (torch.float64 if is_float64 else torch.float32) or (
            is_float64 and state.dtype != torch.float64
        ):
            raise InputError(f"{op}: lse is {logarithm.dtype} for o of {state.dtype}; needs float32, as fmha gives it.")
        if state.stride(4) != 1:
            raise InputError(f"{op}: o has a last stride of {state.stride(4)}; needs 1. Call .contiguous().")
        if state.device != o.device or logarithm.device != o.device:
            raise InputError(
                f"{op}: an o is on {state.device} and its lse on {logarithm.device}, the first o on {o.device}. "
                "Move them to one device."
            )
    if args.out_dtype not in ((torch.float64,) if is_float64 else _RESULTS):
        raise InputError(f"{op}: out_dtype is {args.out_dtype}; allowed are bfloat16, float16, float32.")
