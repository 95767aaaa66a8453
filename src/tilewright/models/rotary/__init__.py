"""Rotary embeddings: which functions, with which tables, and the norms of queries and keys before them."""
