"""Backends of the picture encoder: torch, the C kernels, and exported graphs."""
