"""In torch_npu this module makes `cuda` mean `npu`; here it does nothing."""
