"""Models as files and in memory: bundles, checkpoints, exported encoders, 8-bit weights, and room for all that."""
