"""What `scripts.bench_reading` is made of besides measuring: the pictures that are read, and the page."""
