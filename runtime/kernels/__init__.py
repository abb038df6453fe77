"""The kernels of this project: C sources, how they are compiled, and the resulting shared library."""
