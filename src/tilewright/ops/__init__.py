"""The public ops.  Each is a function; its contract, reference and backends live in the folder of its name."""

from tilewright.ops.norm.rms_norm import rms_norm

__all__ = ["rms_norm"]
