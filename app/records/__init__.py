"""Answers as they are kept: records, files of them, what such a file holds already, and the runs that wrote it."""
