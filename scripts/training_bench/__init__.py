"""The two programs of `scripts.bench_training`, and what both train on."""
