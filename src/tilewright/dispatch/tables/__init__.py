"""Measured tables: which of them are in force, and which rows are stale."""
