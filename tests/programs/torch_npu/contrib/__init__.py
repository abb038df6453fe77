"""The same module exists in torch_npu."""
