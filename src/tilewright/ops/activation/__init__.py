"""Gated activations: act(gate) * up, with gate and up packed in one tensor or as two tensors."""
