"""Tune a user's own kernels: `@tilewright.tune(...)` on the function that launches one.

The first call of a key times every configuration and writes the fastest into the user's table; later calls, and later
processes, read it from there.
"""

from tilewright.tuning.own_kernels.launch import Choice, TunedLaunch, tune

__all__ = ["Choice", "TunedLaunch", "tune"]
