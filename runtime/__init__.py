"""The base of both halves: devices, kernels, weight files, number formats, exported graphs, errors. Knows no model."""
