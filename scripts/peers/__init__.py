"""Other programs that run the same models, and the means to measure them and ours in the same way, in turn."""
