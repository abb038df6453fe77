"""Runners execute the decoder's programs on a device: `eager`, `graph` (compiled decode steps), `kernels` (C, on CPUs).

A new runner implements the protocol `Runner` of `base.py`: run a plan, project pictures, move and clear slots, reset,
warm up. Runners of torch share `async_readback`, which keeps the newest tokens and reads them one step late if the
device has a queue, and `sampler`, which chooses tokens; those of numpy share `host` and `numpy_sampler`. All use
`score_layout` for scored continuations. `llm/load.py` chooses the runner.
"""
