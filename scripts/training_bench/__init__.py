"""The two programs of `scripts.bench_training`, and their common training data."""
