"""bmm in CUDA C++ for Hopper: `engines/hopper_cuda.py`, whose tiles are numbered through all products of the batch."""

from tilewright.ops.gemm.kernels.sm90 import hopper_cuda
from tilewright.ops.gemm.registration import register_bmm

register_bmm("cuda", hopper_cuda, by_batch=True)
