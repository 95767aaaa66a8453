"""Kernels of losses, a folder for each target."""
