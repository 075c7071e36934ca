"""The version, in the one place that states it: the wheel's metadata is made from this line."""

__version__ = "0.1.0"
