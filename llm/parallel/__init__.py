"""Tensor parallelism: one decoder on several devices, each rank a process with its share of every layer."""
