"""Reads weight files safely: safetensors, torch files, TorchScript archives and MindSpore checkpoints."""
