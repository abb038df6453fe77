"""The commands that export the decoder."""
