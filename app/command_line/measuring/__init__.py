"""Measurements: times, rates and ceilings, and reports on them."""
