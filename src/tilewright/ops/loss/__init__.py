"""Losses of classifiers and language models."""
