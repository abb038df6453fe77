"""What training teaches the embedded model: data of the experiments, runs of `train` and `eval`, scores."""
