"""As in torch_npu."""
