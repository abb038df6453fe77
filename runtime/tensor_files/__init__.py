"""Reads weight files safely: safetensors, torch files, TorchScript, GGUF, and checkpoints of MindSpore and Paddle."""
