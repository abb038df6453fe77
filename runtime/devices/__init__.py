"""Devices: one file each, and the registry that opens them."""
