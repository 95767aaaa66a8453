"""Parts of `gated_mlp`: arguments, the reference, the ops it is made of, problems."""
