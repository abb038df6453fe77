"""Tests of folder jobs at full size, one module per part of `scripts.prove_jobs`."""
