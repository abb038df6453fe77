"""The encoder as a file for other runtimes: ONNX, its checks, and from there OM. Running such files is elsewhere."""
