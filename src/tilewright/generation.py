"""One number that tells cached decisions whether they are old.

It grows with every registration, every table that is written, every reading of the environment and every budget of
multiprocessors.  What was decided, or taped, under another number is decided again.
"""

GENERATION = [0]
"""A list, so that every importer sees it grow."""
