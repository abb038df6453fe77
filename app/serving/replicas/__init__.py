"""Replicas: one HTTP API over several services. Each service is a separate process, which Ray Serve manages."""
