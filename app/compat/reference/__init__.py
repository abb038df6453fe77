"""Runs programs of LLaMA-Adapter and MindFormers unchanged, with our modules `llama` and `mindformers`."""
