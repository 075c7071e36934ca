"""What `ecornn bench` measures, against whom, and what is made of it."""
