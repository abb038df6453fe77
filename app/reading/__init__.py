"""Reads pictures into the square of pixels that the encoder takes, in threads or in processes that can be killed."""
