"""The kernels of this project: C sources, their compilation, and the library that they become."""
