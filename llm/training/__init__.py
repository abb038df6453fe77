"""The decoder in training: frozen weights, and what is trained beside them."""
