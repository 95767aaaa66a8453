"""Measured tables: their files, rows and configurations, and what they say of the sizes of an op."""
