"""Replacements for mixtures of experts: the experts, their router, whole blocks."""
