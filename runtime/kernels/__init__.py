"""Our own kernels for processors: C sources, their compilation, and the layers that use them."""
