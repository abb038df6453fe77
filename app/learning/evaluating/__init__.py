"""Evaluation: asks a model about labelled examples, and turns its answers into outcomes for `app/learning/scores`."""
