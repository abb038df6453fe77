"""Scores of answers: metrics with intervals, comparisons of two models, reports. Loads no model."""
