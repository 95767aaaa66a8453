"""Normalisations."""
