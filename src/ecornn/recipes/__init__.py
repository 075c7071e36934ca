"""Whole programs that train something, written with the public API alone, as a user would."""
