"""What `scripts.bench_service` and `scripts.refused_inputs` share: a server process, a light client, and the page."""
