"""Kernels in CUDA C++ for Hopper."""
