"""Selective recomputation of feature maps, for any PyTorch model; begun, not yet a backend."""
