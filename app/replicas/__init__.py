"""Replicas: one HTTP API over several services, each in a process of its own, by Ray Serve."""
