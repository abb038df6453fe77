"""Runners execute the decoder's programs on a device: `eager`, `graph` (compiled decode steps), `native` (C kernels).

A new runner implements the protocol `Runner` of `base.py`: run a plan, project pictures, move and clear slots, reset,
warm up. `async_readback` keeps the newest tokens and reads them late where the device has a queue, `scoring` lays out
scored continuations, and `sampler` chooses tokens; new runners share them. `llm/load.py` chooses the runner.
"""
