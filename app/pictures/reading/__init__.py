"""Reads pictures into squares of pixels for the encoder, in threads or in processes that can be killed."""
