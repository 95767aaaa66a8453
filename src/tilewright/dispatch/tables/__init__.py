"""Measured tables: their files, rows and configurations, which rows are stale, and what they say of an op's sizes."""
