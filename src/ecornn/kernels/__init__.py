"""Kernels: `reference` is the definition, the others must match it."""
