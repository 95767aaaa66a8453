"""How `fmha_fp8` scales and rounds: the numbers that the reference and the kernels share."""

SCALE_BLOCK = 128
"""Tokens of one head that share a scale, where scales are not those of whole heads."""

SHIFT = 8
"""Probabilities are rounded to e4m3 as 2^SHIFT * e^(s - top): the largest, 256, is exact, and it is the largest power
of two that e4m3 (up to 448) holds.
"""
