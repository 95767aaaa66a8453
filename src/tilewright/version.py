"""The version, in a separate module for those that may not import the package."""

__version__ = "0.1.0"
