"""Kernels of our own for x86 processors with AVX-512: C sources, how they are compiled, and what computes by them."""
