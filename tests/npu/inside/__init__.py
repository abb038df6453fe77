"""Programs that run in a process of their own, where torch_npu is loaded on the fake CANN; not collected as tests."""
