"""The captioner, which answers prompts about pictures, and everything that one answer needs."""
