"""Simulates the package that PyPI's ais-bench-benchmark installs under the same name."""
