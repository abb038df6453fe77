"""Jobs on many machines with Ray. Ray is imported inside functions only."""
