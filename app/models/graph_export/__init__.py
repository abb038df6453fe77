"""The commands that export the picture encoder: to ONNX, and from there to an Ascend OM."""
