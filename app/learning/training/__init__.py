"""Training of adapters: which parameters are trained, the training loop, and the files that it writes."""
