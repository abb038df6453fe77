"""Composition and front ends: the command line, the HTTP API, the web page, jobs."""
