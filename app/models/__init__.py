"""Models as files and in memory: bundles, checkpoints, exported encoders, quantised weights, and memory plans."""
