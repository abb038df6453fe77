"""What training teaches the embedded model: data of the experiments, baselines, runs of `train` and `eval`, scores."""
