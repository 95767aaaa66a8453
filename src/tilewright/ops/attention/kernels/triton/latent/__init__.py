"""Latent attention: over a KV cache, how programs find their work on the device, and the two kernels; the sum over heads
of its backward.
"""
