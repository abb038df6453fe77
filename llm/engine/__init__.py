"""Requests, sequences, the scheduler and the step."""
