"""What a GPU does in a layer's call: how much of the time are steps, products, and waiting."""
