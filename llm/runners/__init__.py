"""Runners execute the decoder's programs on a device: `eager`, `graph` (compiled decode steps), `native` (C kernels).

A new runner implements the protocol `Runner` of `base.py`: run a plan, project pictures, move and clear slots, reset,
warm up. Runners share `async_readback`, which keeps the newest tokens and reads them one step late if the device has a
queue, `score_layout` and `scoring` for scored continuations, and `sampler`, which chooses tokens. `llm/load.py`
chooses the runner.
"""
