"""What `ecornn bench profiler` measures: what the memory profiler claims, each model in its own
process."""
