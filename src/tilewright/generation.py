"""The generation of cached decisions: a plan or captured launch of an older generation is invalid.

Every `register_impl`, written table, reading of the environment and change of the SM budget begins a new generation.
"""

GENERATION = [0]
"""A list of one number, so that every importer sees its changes."""
