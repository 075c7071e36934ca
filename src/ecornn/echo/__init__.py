"""Selective recomputation of feature maps, for any PyTorch model; not yet a compile backend."""
