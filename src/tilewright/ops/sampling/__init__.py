"""Sampling: penalties of logits, the choice of the next token, verification of drafted tokens."""
