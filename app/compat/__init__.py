"""Compatibility with MindFormers, MindSpore Lite, ModelRunner and PaddleNLP: their calls, classes and files.

`pipeline` and `TextStreamer` have the interface of MindFormers, `InferTask` and `InferConfig` that of MindSpore Lite,
and `ModelRunner` that of CANN's recipes. All use the captioner. `foreign` converts their settings files, and
PaddleNLP's options, into settings of this package. No module here computes anything. Outside this package, only the
public names, `--config` and `app/reference` import it.
"""
