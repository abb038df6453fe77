"""Runs programs of OpenGVLab/LLaMA-Adapter unchanged: a module `llama` whose models are computed here."""
