"""Jobs: `caption` and `ask` over any number of pictures."""
