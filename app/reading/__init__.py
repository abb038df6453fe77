"""Reads a picture's bytes into the square of pixels that the encoder takes, in threads or in killable processes."""
