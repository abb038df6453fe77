"""Files of a LLaMA and of adapters come in; the decoder's configuration and tensors go out. Read build.py first."""
