"""Softmax.  The folder cannot have that name: `ops.softmax` is the function."""
