"""Pictures in, visual query out: the picture half. Knows no language model."""
