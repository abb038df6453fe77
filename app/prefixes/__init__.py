"""Prefix files: pictures that one machine encoded, for a decoder on another."""
