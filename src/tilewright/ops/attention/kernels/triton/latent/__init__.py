"""Latent attention over a KV cache: how programs find their work, both kernels; the sum over heads of its backward."""
