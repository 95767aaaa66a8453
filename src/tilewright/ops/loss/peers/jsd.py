"""Liger's divergence, which takes log-probabilities."""

import torch

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.ops.jsd import LigerJSDFunction

    (student, teacher, *rest), options = sample.args, sample.kwargs
    if student.dim() != 2 or student.requires_grad:  # its backward waits for its cotangent, which no graph can
        return None
    if options.get("reduction", "batchmean") != "batchmean" or options.get("log_probs"):
        return None
    target, temperature = rest[0] if rest else None, options.get("temperature", 1.0)
    form = options.get("beta", 0.5), options.get("ignore_index", -100)

    def call() -> object:
        logs = (torch.log_softmax(x.float() / temperature, -1) for x in (student, teacher))
        return LigerJSDFunction.apply(*logs, target, *form)

    return call


PEERS = (LibraryPeer("liger", "liger_kernel", _liger),)
