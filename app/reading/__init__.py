"""A picture's bytes -> the square of pixels that the encoder takes, in threads or in processes that can be killed."""
