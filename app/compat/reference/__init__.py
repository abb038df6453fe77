"""Runs programs of OpenGVLab/LLaMA-Adapter unchanged: provides the module `llama`, implemented with a captioner."""
