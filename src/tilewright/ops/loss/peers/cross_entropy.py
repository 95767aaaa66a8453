"""Other cross entropies: Liger's and quack's.  torch's own is in the reference, so the peer "eager"."""

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer


def _liger(sample: Sample) -> Call | None:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    x, target = sample.args
    options = sample.kwargs
    if x.dim() != 2 or x.requires_grad:  # its forward writes the gradient over x, which the bench reads again
        return None
    weight, ignored = options.get("weight"), options.get("ignore_index", -100)
    numbers = options.get("z_loss", 0.0), options.get("label_smoothing", 0.0)
    form = options.get("reduction", "mean"), options.get("softcap")
    return lambda: LigerCrossEntropyFunction.apply(x, target, weight, ignored, *numbers, *form)[0]


def _quack(sample: Sample) -> Call | None:
    from quack.cross_entropy import cross_entropy

    x, target = sample.args
    if x.dim() != 2 or set(sample.kwargs) - {"reduction", "ignore_index"}:
        return None
    options = {"reduction": "mean", **sample.kwargs}
    return lambda: cross_entropy(x, target, **options)


PEERS = (
    LibraryPeer("liger", "liger_kernel", _liger),
    LibraryPeer("quack", "quack", _quack),
)
