"""What `scripts/bench_engine.py` measures, a module each."""
