"""Training of adapters: what is trained, and how it is written."""
