"""Visual query and token ids in, text out: the language half. Knows no picture."""
