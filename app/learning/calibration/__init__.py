"""`calibrate`: asks about labelled pictures, fits the thresholds of a decision, and reports how good they are."""
