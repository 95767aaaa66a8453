"""What `adamw` excludes."""

import torch
from torch import Tensor

from tilewright.dispatch.derivatives import has_tangent
from tilewright.errors import InputError
from tilewright.ops.rows import FLOATS

_MASTERS = (torch.float32, torch.float64)
_STATES = (torch.float32, torch.bfloat16, torch.float64)


def check_numbers(op: str, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    """Raise InputError for numbers out of range; NaN is in none."""
    for name, number in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not number >= 0:
            raise InputError(f"{op}: {name} is {number}; needs a number of at least 0.")
    for name, number in (("betas[0]", beta1), ("betas[1]", beta2)):
        if not 0 <= number < 1:
            raise InputError(f"{op}: {name} is {number}; needs a number in [0, 1).")


def check_parameter(op: str, param: Tensor, grad: Tensor, copy_dtype: torch.dtype, **states: Tensor) -> None:
    """Raise InputError unless all are tensors of one shape and device, in dtypes that go together."""
    for name, t in (("grad", grad), *states.items()):
        if not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
        if t.shape != param.shape or t.device != param.device:
            raise InputError(
                f"{op}: {name} is {tuple(t.shape)} on {t.device}, param {tuple(param.shape)} on {param.device}; they "
                "must have one shape and device."
            )
    if param.dtype not in FLOATS:
        raise InputError(f"{op}: param is {param.dtype}; needs one of bfloat16, float16, float32.")
    if copy_dtype != param.dtype and not (param.dtype in _MASTERS and copy_dtype in (torch.bfloat16, torch.float16)):
        raise InputError(
            f"{op}: copy_dtype is {copy_dtype}, param {param.dtype}; a float32 param may have a copy in bfloat16 or "
            "float16, others have None."
        )
    if grad.dtype not in (param.dtype, copy_dtype):
        raise InputError(f"{op}: grad is {grad.dtype}; needs {param.dtype}, param's, or copy_dtype. Cast it first.")


def check_states(op: str, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """Raise InputError unless both averages have one dtype of floating-point numbers."""
    if exp_avg.dtype not in _STATES or exp_avg_sq.dtype != exp_avg.dtype:
        raise InputError(
            f"{op}: exp_avg is {exp_avg.dtype}, exp_avg_sq {exp_avg_sq.dtype}; both must be float32, or both bfloat16."
        )


def check_codes(op: str, blocks: int, **states: Tensor) -> None:
    """Raise InputError unless averages are codes, whose shapes are checked already, and their scales one a block."""
    device = states["exp_avg"].device
    for name, t in states.items():
        if not name.endswith("_scale"):
            if t.dtype != torch.uint8:
                raise InputError(f"{op}: {name} is {t.dtype}; needs torch.uint8, codes of the dynamic map.")
        elif not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
        elif t.dtype not in _MASTERS or tuple(t.shape) != (blocks,) or t.device != device:
            raise InputError(
                f"{op}: {name} is {tuple(t.shape)} {t.dtype} on {t.device}; needs ({blocks},) torch.float32 on "
                f"{device}, one for 256 elements."
            )


def check_scalar(op: str, name: str, t: Tensor | None, param: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Raise InputError unless `t` is None or one number of this dtype on the device of `param`."""
    if t is None:
        return
    if not isinstance(t, Tensor):
        raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a tensor () {dtype}.")
    if t.numel() != 1 or t.dtype not in (dtype, _ORACLE.get(dtype)) or t.device != param.device:
        raise InputError(
            f"{op}: {name} is {tuple(t.shape)} {t.dtype} on {t.device}; needs one {dtype} on {param.device}."
        )


def check_no_derivative(op: str, *tensors: Tensor | None) -> None:
    """Raise InputError where a gradient or a tangent of the step is wanted."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise InputError(f"{op}: a gradient through the step is wanted, and there is none. Use torch.no_grad().")
    if has_tangent(*tensors):
        raise InputError(f"{op} has no forward mode, and an argument has a tangent. Call it on the primal.")


_ORACLE = {torch.float32: torch.float64}
"""References also run on float64."""
