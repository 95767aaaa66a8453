"""How source becomes a running kernel: compilers, caches and launchers.  Nothing here knows an op."""
