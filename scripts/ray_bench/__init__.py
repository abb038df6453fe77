"""Parts of `scripts/bench_ray.py`."""
