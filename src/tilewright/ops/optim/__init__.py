"""Steps of optimizers, one parameter a call, and norms of gradients."""
