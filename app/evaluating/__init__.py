"""Evaluation: labelled examples are asked, and their answers become outcomes that `app/scores` scores."""
