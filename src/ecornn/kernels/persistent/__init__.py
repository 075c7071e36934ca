"""Persistent kernels: recurrent weights stay on chip for all time steps; sources in `../cuda`."""
