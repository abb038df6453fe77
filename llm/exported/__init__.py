"""The decoder as static graphs: their export, the steps that they take, and a runner without torch.

`step.py` has the ports of the graphs, `onnx_graph.py` builds them, `weights_file.py` writes their weights. `runner.py`
runs them behind the protocol of all runners; `onnx_program.py` and `host_program.py` keep the cache for it.
"""
