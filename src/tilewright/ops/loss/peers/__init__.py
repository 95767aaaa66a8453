"""Losses of other libraries."""
