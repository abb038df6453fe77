"""Our own kernels for x86 processors with AVX-512: C sources, their compilation, and the layers that use them."""
