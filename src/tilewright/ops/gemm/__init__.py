"""Matrix products: dense, scaled and grouped.  Ops, what they share in `dense`, `scaled` and `grouped`, and their kernels."""
