"""Fuzz targets for all code that reads data of others: files, requests, page events. See docs/fuzzing.md."""
