"""Strategies: the passes of a graph in, the results to keep between them out."""
