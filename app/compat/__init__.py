"""What users of MindFormers, MindSpore Lite, ModelRunner and PaddleNLP bring: their calls, their classes, their files.

`pipeline` and `TextStreamer` are MindFormers' calls, `InferTask` and `InferConfig` MindSpore Lite's, and `ModelRunner`
that of CANN's recipes, all over the one captioner. `foreign` reads their settings files, and PaddleNLP's options, into
ours. Nothing here computes, and nothing outside imports it but the public names and `--config`.
"""
