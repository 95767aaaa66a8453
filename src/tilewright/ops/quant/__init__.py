"""Quantisation: formats of scales, casts to float8, packed integer weights."""
