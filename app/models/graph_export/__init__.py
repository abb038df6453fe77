"""The exports: the picture encoder as ONNX, a whole model as static graphs, and ONNX as an Ascend OM."""
