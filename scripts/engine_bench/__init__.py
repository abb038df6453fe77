"""Measurements of `scripts.bench_engine`, one module each."""
