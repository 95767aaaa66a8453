"""Rotary position embedding: the op, and the tables of angles it reads (`tables`)."""
