"""`torch.autograd.Function` at the price of its C++ half."""

from typing import Any

import torch


class Function(torch.autograd.Function):
    """Where a `setup_context` is defined, torch's `apply` first binds the arguments by inspection of `forward`, 15 to
    25 us a call.  Only functorch transforms need that; here arguments are positional and complete.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As torch's, without keywords and defaults."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        # Of the C++ base, which mypy does not see
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]
