"""The decoder as static graphs: their export, their steps, and a runner without torch.

`step.py` has the ports of the graphs, `onnx_graph.py` builds them, and `weights_file.py` writes their weights.
`runner.py` implements the protocol of all runners. `onnx_program.py` and `host_program.py` run the graphs and
keep the cache.
"""
