"""Other losses fused with the last linear layer: torch's two steps, and Liger's."""

import torch.nn.functional as F

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _torch(sample: Sample) -> Call | None:
    hidden, weight, target = sample.args
    options = dict(sample.kwargs)
    bias = options.pop("bias", None)
    if hidden.dim() != 2 or set(options) - {"label_smoothing", "reduction", "ignore_index"}:
        return None
    return lambda: F.cross_entropy(F.linear(hidden, weight, bias).float(), target, **options)


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    hidden, weight, target = sample.args
    options = sample.kwargs
    if options.get("reduction", "mean") == "none":
        return None
    arguments = (
        hidden, weight, target, options.get("bias"), options.get("class_weight"), options.get("ignore_index", -100),
        options.get("z_loss", 0.0), options.get("label_smoothing", 0.0), options.get("reduction", "mean"),
        options.get("softcap"),
    )  # fmt: skip
    return lambda: LigerFusedLinearCrossEntropyFunction.apply(*arguments)[0]


PEERS = (LibraryPeer("torch", None, _torch), LibraryPeer("liger", "liger_kernel", _liger))
