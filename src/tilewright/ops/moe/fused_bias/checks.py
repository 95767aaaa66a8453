"""What `fused_moe_bias` refuses."""

from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.moe.fused import checks
from tilewright.ops.moe.fused_bias.args import FusedMoeBiasArgs, plain

ACTIVATIONS = (*checks.ACTIVATIONS, "swigluoai")


def check(args: FusedMoeBiasArgs) -> None:
    """Raise InputError for what the docstring of `fused_moe_bias` excludes."""
    op, x = "fused_moe_bias", args.x
    checks.check(plain(args))
    experts, width, inner = args.w2.shape
    for name, bias, columns in (("w1_bias", args.w1_bias, 2 * inner), ("w2_bias", args.w2_bias, width)):
        if bias is None:
            continue
        if not isinstance(bias, Tensor) or tuple(bias.shape) != (experts, columns) or bias.dtype != x.dtype:
            got = f"{tuple(bias.shape)} {bias.dtype}" if isinstance(bias, Tensor) else f"a {type(bias).__name__}"
            raise InputError(f"{op}: {name} is {got}; needs ({experts}, {columns}) {x.dtype}, a row for each expert.")
        if bias.device != x.device:
            raise InputError(f"{op}: {name} is on {bias.device}, x on {x.device}. Move them to one device.")
    if args.activation not in ACTIVATIONS:
        allowed = ", ".join(map(repr, ACTIVATIONS))
        raise InputError(f"{op}: activation is {args.activation!r}; allowed are {allowed}.")
    if not args.limit > 0:
        raise InputError(f"{op}: limit is {args.limit}; needs a number above 0, or inf for no clamp.")
