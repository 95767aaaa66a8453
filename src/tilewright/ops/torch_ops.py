"""`torch.ops.tilewright` imports an op when it is first asked for one.

An exported program, or a graph from Inductor's cache, names ops by `torch.ops.tilewright._rms_norm_fwd`, also in a
process that has imported `tilewright.ops` and called none.  Programs that look ops up in C++ alone (AOTInductor
packages, TorchScript) do not pass here: call `tilewright.dispatch.contracts()`, which imports every op, before loading
one.
"""

from typing import Any

import torch
from torch._ops import _OpNamespace

from tilewright import catalogue


class Namespace(_OpNamespace):
    """`torch.ops.tilewright`."""

    __module__ = _OpNamespace.__module__  # torch names ops after it

    def __getattr__(self, op_name: str) -> Any:
        try:
            return super().__getattr__(op_name)
        except AttributeError:
            if op_name.startswith("__"):
                raise
        catalogue.load(_public(op_name))
        return super().__getattr__(op_name)


def install() -> None:
    """Make `torch.ops.tilewright` a `Namespace`; what it has handed out stays valid."""
    torch.ops.tilewright.__class__ = Namespace


def _public(name: str) -> str:
    """The public op that a raw one, `_rms_norm_fwd`, belongs to: its name ends in what the raw op does."""
    public = name.removeprefix("_")
    while public != name and "_" in public and not catalogue.announced(public):
        public = public.rpartition("_")[0]
    return public
