"""The base of `vision` and `llm`: devices, kernels, weight files, number formats, graphs, errors. Knows no model."""
