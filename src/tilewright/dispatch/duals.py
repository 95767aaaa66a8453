"""Forward-mode derivatives: is somebody computing any?"""

from torch import Tensor
from torch.autograd import forward_ad


def level_is_open() -> bool:
    """Whether tensors may carry tangents here: within `forward_ad.dual_level`, `torch.func.jvp` or `jacfwd`."""
    return forward_ad._current_level >= 0


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether one of the tensors carries a tangent."""
    return level_is_open() and any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)
