"""Measured tables: their files, rows and configurations, the rows that are stale, and what they say of an op's sizes."""
