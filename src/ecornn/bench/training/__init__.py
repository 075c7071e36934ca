"""What `ecornn bench echo` measures: whole training steps, each contender in its own process."""
