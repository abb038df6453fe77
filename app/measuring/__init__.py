"""Measurements: times, rates and ceilings, and reports of them."""
