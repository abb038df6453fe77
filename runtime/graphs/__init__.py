"""Exported graphs: ONNX and OM files, their checks, ATC, and the sessions that run them."""
