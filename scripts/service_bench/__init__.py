"""Measurements of `scripts.bench_service`: a server process, its clients, and what they send."""
