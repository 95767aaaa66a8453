"""Matrix products: the public ops, what they share in `dense`, `scaled` and `grouped`, and their kernels by target."""
