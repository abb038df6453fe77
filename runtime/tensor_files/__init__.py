"""Weight files of every format, read safely: safetensors, torch, TorchScript archives."""
