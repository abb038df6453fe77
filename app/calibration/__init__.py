"""Calibration of choice probabilities, and decisions based on them."""
