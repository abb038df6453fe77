"""What answers: files of a model come in, a loaded encoder and decoder go out.

spec.py describes a model, its device and its limits. bundle.py and checkpoints.py load it, encoders.py chooses what
runs the encoder, number_formats.py chooses the dtype and plans the memory, and memory_fit.py fits the model into it.
`parallel` starts and watches the ranks of a split decoder, and `graph_export` writes encoder and decoder as graphs.
Read spec.py first.
"""
