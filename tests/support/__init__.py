"""What tests share: tolerances, and an oracle that knows nothing of the library."""
