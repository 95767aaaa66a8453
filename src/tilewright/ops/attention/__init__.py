"""Attention: softmax(scale * Q K^T) V in one pass over the keys, with masks and score modifiers, there and back."""
