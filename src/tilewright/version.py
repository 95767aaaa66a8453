"""The version, apart from everything else, for those who may not look up at the package."""

__version__ = "0.1.0"
