"""Other ways to merge: the two-state form that ring attention is usually written in, in eager torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.ops.attention.merge_states.args import raw_arguments, results
from tilewright.ops.peer import Call, LibraryPeer


def _sigmoid(sample: Sample) -> Call | None:
    """o_1 - sigmoid(lse_2 - lse_1) (o_1 - o_2), lse_1 - logsigmoid(lse_1 - lse_2): two states, none of them -inf."""
    args = raw_arguments(sample.args[0], sample.args[1], sample.kwargs.get("out_dtype"))
    o, lse, other, other_lse = args.o, args.lse, args.other, args.other_lse
    if other is None and o.shape[0] != 2:
        return None
    a, la = o[0], lse[0]
    b, lb = (o[1], lse[1]) if other is None or other_lse is None else (other[0], other_lse[0])

    def call() -> tuple[Tensor, Tensor]:
        share = torch.sigmoid(lb - la).unsqueeze(-1)
        merged = (a - share * (a.float() - b.float())).to(args.out_dtype)
        return results(merged, la - F.logsigmoid(la - lb), sample.args[1])

    return call


PEERS = (LibraryPeer("sigmoid", None, _sigmoid),)
