"""The public ops.  Each is a function; its contract, reference and backends live in the folder of its name."""

from tilewright.ops.norm.add_rms_norm import add_rms_norm
from tilewright.ops.norm.layer_norm import layer_norm
from tilewright.ops.norm.rms_norm import rms_norm

__all__ = ["add_rms_norm", "layer_norm", "rms_norm"]
