"""Ranks as processes: how they are started and joined, load their share of a model, are watched, and end.

`llm/parallel` has what ranks compute.
"""
