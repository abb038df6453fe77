"""Continuous batching: requests come in, tokens go out. Read engine.py first, then scheduler.py."""
