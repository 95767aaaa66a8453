"""Which devices have autocast, known before a compiler traces: Dynamo of torch 2.11 cannot trace the question."""

from torch.amp.autocast_mode import is_autocast_available

_KINDS = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "xla")
AUTOCASTS = frozenset(kind for kind in _KINDS if is_autocast_available(kind))
"""Types of device for which `torch.autocast` may be asked."""
