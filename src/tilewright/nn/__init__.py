"""The ops as torch.nn.Modules, with the parameter names of the modules that they replace."""

from tilewright.nn.attention import Attention
from tilewright.nn.differential_attention import DifferentialAttention
from tilewright.nn.fp8_linear import FP8Linear
from tilewright.nn.gated_norm import RMSNormGated
from tilewright.nn.group_norm import GroupNorm
from tilewright.nn.int8_linear import Int8Linear
from tilewright.nn.linear import Linear
from tilewright.nn.loss import CrossEntropyLoss, LinearCrossEntropyLoss
from tilewright.nn.mlp import GeGLUMLP, SwiGLUMLP
from tilewright.nn.norm import AddRMSNorm, LayerNorm, RMSNorm
from tilewright.nn.rotary import RotaryEmbedding
from tilewright.nn.smoothing import smooth_, smoothing_factors
from tilewright.nn.softmax import Softmax, Sparsemax
from tilewright.nn.weight_only_linear import WeightOnlyLinear

__all__ = [
    "AddRMSNorm",
    "Attention",
    "CrossEntropyLoss",
    "DifferentialAttention",
    "FP8Linear",
    "GeGLUMLP",
    "GroupNorm",
    "Int8Linear",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "RMSNormGated",
    "RotaryEmbedding",
    "Softmax",
    "Sparsemax",
    "SwiGLUMLP",
    "WeightOnlyLinear",
    "smooth_",
    "smoothing_factors",
]
