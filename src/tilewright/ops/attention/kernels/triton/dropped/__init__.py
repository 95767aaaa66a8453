"""Attention with dropout: the words of Philox for a tile of scores, and the launches of `fmha_dropout`."""
