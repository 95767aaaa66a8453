"""Which calls a backend's kernels refuse, by the forward's own answer."""

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.dispatch import Contract, implementations, record


def refusal(contract: Contract, params: Mapping[str, Any], backend: str) -> str | None:
    """Why `backend` does not compute the forward of these inputs; None if it does."""
    supports = implementations(contract.name, "fwd")[backend].supports
    if supports is None:
        return None
    sample = contract.inputs(params, contract.dtypes[0], torch.device("cpu"), 0)
    with record() as recording, torch.no_grad():
        contract.function(*sample.args, backend="torch", **sample.kwargs)
    return supports(*next(args for raw, args, *_ in recording.calls if raw is contract.forward))
