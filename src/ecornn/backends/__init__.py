"""Adapters between the recurrence op and the kernels that can carry it out."""
