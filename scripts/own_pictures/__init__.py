"""Small ordinary sets of pictures, other methods that learn them, and the network that is trained from scratch."""
