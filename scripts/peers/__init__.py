"""Other programs that run the same models, and the code that measures them and our engine in the same way, in turn."""
