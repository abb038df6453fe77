"""The decoder in training: frozen weights, and trained parameters in addition to them."""
