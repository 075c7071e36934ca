"""What is known of a graph before anything is planned."""
