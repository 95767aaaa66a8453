"""Softmax and other reductions over rows, and dropout.  `ops.softmax` is the function, so no folder has that name."""
