"""The mathematics of the decoder, with explicit inputs."""
