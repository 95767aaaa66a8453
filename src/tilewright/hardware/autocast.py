"""The device types with autocast, read at import: Dynamo of torch 2.11 cannot trace the query."""

from torch.amp.autocast_mode import is_autocast_available

_KINDS = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "xla")
AUTOCASTS = frozenset(kind for kind in _KINDS if is_autocast_available(kind))
"""Device types that `torch.autocast` supports."""
