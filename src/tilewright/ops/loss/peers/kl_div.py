"""Liger's divergence of log-probabilities."""

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.ops.kl_div import LigerKLDivLossFunction

    log_probs, target = sample.args
    if (
        log_probs.dim() != 2 or log_probs.requires_grad
    ):  # its backward reads its cotangent on the host, which no graph can
        return None
    form = sample.kwargs.get("reduction", "mean"), sample.kwargs.get("log_target", False)
    return lambda: LigerKLDivLossFunction.apply(log_probs, target, *form)


PEERS = (LibraryPeer("liger", "liger_kernel", _liger),)
