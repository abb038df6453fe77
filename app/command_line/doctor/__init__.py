"""Checks a model, an exported encoder and this machine before they are used."""
