"""Trains the small model in assets/embedded: its world of drawn pictures, its questions, its stages, its scores."""
