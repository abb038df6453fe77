"""Exported graphs: ONNX, OM and MindIR files, their checks, ATC, and the sessions that run them."""
