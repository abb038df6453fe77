"""Ranks as processes: started and joined, given their share of a model, watched, and ended. See llm/parallel."""
