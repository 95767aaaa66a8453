"""Other ways to merge: the two-state form that ring attention is usually written in, in eager torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.ops.attention.merge_states.args import raw_arguments, results
from tilewright.ops.peer import Call, LibraryPeer


def _sigmoid(sample: Sample) -> Call | None:
    """o_1 - sigmoid(lse_2 - lse_1) (o_1 - o_2), lse_1 - logsigmoid(lse_1 - lse_2): two states, none of them -inf."""
    lse = sample.args[1]
    *stacks, out_dtype = raw_arguments(sample.args[0], lse, sample.kwargs.get("out_dtype"))
    first, lse, second, lse_of_second = stacks
    if second is None and first.shape[0] != 2:
        return None

    def call() -> tuple[Tensor, Tensor]:
        (a, b), (la, lb) = (first, lse) if second is None else ((first[0], second[0]), (lse[0], lse_of_second[0]))
        share = torch.sigmoid(lb - la).unsqueeze(-1)
        merged = (a - share * (a.float() - b.float())).to(out_dtype)
        return results(merged, la - F.logsigmoid(la - lb), lse)

    return call


PEERS = (LibraryPeer("sigmoid", None, _sigmoid),)
