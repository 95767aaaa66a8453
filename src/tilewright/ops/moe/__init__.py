"""Mixture of experts: routing, the order of tokens by expert, and the experts themselves."""
