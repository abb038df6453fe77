"""The decoder's layers, attention, adapter and KV cache. Read llama.py first."""
