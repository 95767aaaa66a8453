"""Attention over a KV cache: what `fmha_decode` and `fmha_paged` share."""
