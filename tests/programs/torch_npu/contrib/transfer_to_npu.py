"""Makes `cuda` mean `npu` in torch; here nothing."""
