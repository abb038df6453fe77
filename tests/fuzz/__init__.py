"""Fuzz targets for everything that reads what others wrote: files, requests, page events. See docs/fuzzing.md."""
