"""Weights in 8 or 4 bits, activations in 16: products of few rows, bound by reading the weights.

`quantize_weight` makes them once, `weight_only_matmul` multiplies by them; `packing.py` says how they lie in memory.
"""
