"""The parts of losses of a linear layer."""
