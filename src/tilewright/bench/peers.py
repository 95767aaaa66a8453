"""The peers of our kernels: eager torch and torch.compile for every op, and the libraries in `peers.py` of its folder.

Such a file holds `PEERS`, a sequence of objects with the members of `Peer`; it imports its library only inside them.
A peer may have `cases`, names of workloads, or `devices`, types of devices, to which it is limited, and
`judge(sample, outputs)`, which says whether they are right where it draws random numbers of its own. `REPLACES` of the
file maps a type of device to the names of general peers that one of its own replaces there.

`make` gets a sample whose tensors may require gradients, and returns the call that computes the op's outputs in the
order of the public function, or None where the library has no such option.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

from tilewright.dispatch import Contract, Sample
from tilewright.dispatch.backends import module_exists
from tilewright.errors import UsageError

Call = Callable[[], object]


class Peer(Protocol):
    """Another implementation of one op."""

    @property
    def name(self) -> str: ...

    def available(self) -> bool: ...

    def make(self, sample: Sample) -> Call | None: ...


@dataclass(frozen=True)
class Eager:
    """The reference in eager torch, op by op: what a model runs without this library."""

    contract: Contract
    name: str = "eager"

    def available(self) -> bool:
        return True

    def make(self, sample: Sample) -> Call:
        return bound(self.contract.reference, sample)


class Compiled:
    """torch.compile of the reference with static shapes, compiled for each case."""

    name = "compile"

    def __init__(self, contract: Contract, device: torch.device) -> None:
        self._contract, self._device = contract, device
        self._compiled: Callable[..., Any] | None = None

    def available(self) -> bool:
        """Inductor needs Triton on a GPU and a C++ compiler on a CPU."""
        if self._device.type == "cuda":
            return module_exists("triton")
        return shutil.which("g++") is not None or shutil.which("clang++") is not None

    def make(self, sample: Sample) -> Call:
        if self._compiled is None:
            # Past its recompile limit Dynamo would run the reference uncompiled, under this name
            torch.compiler.reset()
            self._compiled = torch.compile(self._contract.reference, fullgraph=True, dynamic=False)
        return bound(self._compiled, sample)


def bound(function: Callable[..., object], sample: Sample) -> Call:
    """`function` on the arguments of `sample`."""
    args, kwargs = sample.args, dict(sample.kwargs)
    return lambda: function(*args, **kwargs)


def declared_peers(contract: Contract, device: torch.device) -> list[Peer]:
    """All peers of this op on this device, installed on this machine or not."""
    replaced = _replaced(contract).get(device.type, ())
    general = [peer for peer in (Eager(contract), Compiled(contract, device)) if peer.name not in replaced]
    return [
        *general,
        *(peer for peer in _library_peers(contract) if device.type in getattr(peer, "devices", (device.type,))),
    ]


def available_peers(
    contract: Contract,
    device: torch.device,
    against: Sequence[str] | None = None,
    *,
    case: str,
    invited: Sequence[str] = (),
) -> list[Peer]:
    """Peers that can run on this machine and take part in workload `case`; with `against`, only those named.

    invited: names of peers that take part although they are limited to other workloads.
    """
    selected = (peer for peer in declared_peers(contract, device) if against is None or peer.name in against)
    present = (peer for peer in selected if peer.name in invited or case in getattr(peer, "cases", (case,)))
    return [peer for peer in present if peer.available()]


def check_names(contracts: Iterable[Contract], device: torch.device, against: Sequence[str]) -> None:
    """Raise UsageError for a name that is no peer of any of the ops."""
    names = {peer.name for contract in contracts for peer in declared_peers(contract, device)}
    unknown = sorted(set(against) - names)
    if unknown:
        raise UsageError(f"no peer named {', '.join(unknown)}. Peers of these ops: {', '.join(sorted(names))}.")


def _library_peers(contract: Contract) -> Sequence[Peer]:
    module = _module(contract)
    return module.PEERS if module is not None else ()


def _replaced(contract: Contract) -> Mapping[str, Sequence[str]]:
    return getattr(_module(contract), "REPLACES", {})


def _module(contract: Contract) -> Any:
    name = f"{contract.forward.package}.peers.{contract.name}"
    return import_module(name) if module_exists(name) else None
