"""Optimizers on top of the ops, with the names and state of torch's: `AdamW`, `Muon`, and `clip_grad_norm_`."""

from tilewright.optim.adamw import AdamW
from tilewright.optim.clip import clip_grad_norm_
from tilewright.optim.muon import Muon

__all__ = ["AdamW", "Muon", "clip_grad_norm_"]
