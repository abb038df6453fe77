"""`caption` and `ask` over any number of pictures: what is asked, what is known already, and where answers go."""
