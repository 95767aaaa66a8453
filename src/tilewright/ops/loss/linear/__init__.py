"""The parts of `linear_cross_entropy`."""
