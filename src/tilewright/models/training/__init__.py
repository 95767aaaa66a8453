"""What `patch(mode="train")` adds: the loss without logits, and the comparison of losses and gradients."""
