"""llama.cpp through llama-cpp-python: its batch API, greedy decoding, all rows in one call."""

import ctypes
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from scripts.peers.packages import MissingPackage, require
from scripts.peers.sizes import CONTEXT, NUM_PROMPT_TOKENS

PACKAGES = ("llama-cpp-python", "gguf")
Quantisation = Literal["q8_0", "q4_0"]

_ALL_LAYERS = 999  # more than any model has
_MICRO_BATCH = 512  # tokens computed at once; llama.cpp's default
_quiet: list[Any] = []  # keeps the callback alive as long as the library may call it


class LlamaCpp:
    """A model of llama.cpp with up to `num_rows` sequences, each with its own cache.

    With `gpu`, all layers, keys and values are on the GPU.
    """

    def __init__(self, path: str | os.PathLike[str], *, num_rows: int, num_threads: int, gpu: bool = False) -> None:
        self._lib = lib = _library()
        placing = lib.llama_model_default_params()
        if gpu:
            placing.n_gpu_layers = _ALL_LAYERS
        self._model = lib.llama_model_load_from_file(str(path).encode(), placing)
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {Path(path).name}")
        settings = lib.llama_context_default_params()
        settings.n_ctx = num_rows * CONTEXT
        settings.n_seq_max = num_rows
        settings.n_batch = max(num_rows * NUM_PROMPT_TOKENS, _MICRO_BATCH)
        settings.n_ubatch = _MICRO_BATCH
        settings.n_threads = settings.n_threads_batch = num_threads
        settings.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_AUTO
        settings.kv_unified = False  # each sequence attends only to its own positions
        settings.offload_kqv = settings.op_offload = True
        settings.no_perf = True
        self._context = lib.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not make a context of {num_rows} rows")
        self._memory = lib.llama_get_memory(self._context)
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(settings.n_batch, 0, 1)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self._lib.llama_memory_clear(self._memory, True)
        tokens = [
            (token, position, row, position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        return self._decode(tokens)

    def spread(self, num_rows: int) -> None:
        for row in range(1, num_rows):
            self._lib.llama_memory_seq_cp(self._memory, 0, row, -1, -1)

    def step(self, token_ids: Sequence[int], position: int) -> list[int]:
        return self._decode([(token, position, row, True) for row, token in enumerate(token_ids)])

    def _decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Decode (token, position, row, whether its logits are wanted) in one call.

        Returns the best token of each wanted.
        """
        batch = self._batch
        batch.n_tokens = len(tokens)
        for place, (token, position, row, is_wanted) in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
            batch.logits[place] = is_wanted
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {len(tokens)} tokens returned {status}")
        wanted = [place for place, token in enumerate(tokens) if token[3]]
        return [int(self._logits(place).argmax()) for place in wanted]

    def _logits(self, place: int) -> np.ndarray:
        pointer = self._lib.llama_get_logits_ith(self._context, place)
        return np.ctypeslib.as_array(pointer, (self._vocab_size,))


def require_gpu() -> None:
    """Raise MissingPackage if the library is missing or was compiled for the CPU only."""
    if not _library().llama_supports_gpu_offload():
        raise MissingPackage("llama-cpp-python was compiled without support for GPUs")


def instructions() -> str:
    """The instruction sets that the library reports, such as `AVX2 AVX512 AVX512_BF16`."""
    told = _library().llama_print_system_info().decode()
    return " ".join(re.findall(r"(\w+) = 1", told))


def quantise_gguf(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, kind: Quantisation, num_threads: int
) -> None:
    """Quantise a GGUF file with llama.cpp's own function; the file is written completely or not at all."""
    lib = _library()
    settings = lib.llama_model_quantize_default_params()
    settings.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    settings.nthread = num_threads
    partial = Path(target).with_suffix(".partial")
    status = lib.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(settings))
    if status != 0:
        raise RuntimeError(f"llama.cpp could not quantise {Path(source).name} to {kind} (status {status})")
    partial.replace(target)


def _library() -> Any:
    """llama.cpp's functions, initialised, with logging turned off."""
    lib = require("llama_cpp.llama_cpp", package="llama-cpp-python")
    if not _quiet:
        _quiet.append(lib.llama_log_callback(lambda level, text, data: None))
        lib.llama_log_set(_quiet[0], None)
        lib.llama_backend_init()
    return lib
