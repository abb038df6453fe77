"""Backends of the picture encoder: torch, and exported graphs."""
