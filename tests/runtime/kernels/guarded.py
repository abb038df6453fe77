"""Computes layers and encoders in memory before a page without access: `python -m tests.runtime.kernels.guarded SET`.

Reading or writing further ends the process by a signal. Scratch memory begins as NaN, and no result may depend on it.
"""

import ctypes
import mmap
import sys

import numpy as np
import torch

from llama_adapter.runtime.devices.cpu_linear import NativeLinear
from llama_adapter.runtime.kernels import library as kernels
from llama_adapter.runtime.kernels.library import KINDS
from tests.runtime.kernels.instruction_sets import library_for
from tests.runtime.kernels.test_linear import layer
from tests.runtime.kernels.test_matrices import HEADS, spread, stack

ROWS = (1, 9, 15, 17, 33, 50, 65, 130)
_KEPT: list[mmap.mmap] = []


def guarded(num_bytes: int, *, aligned: int = 1) -> np.ndarray:
    """`num_bytes` bytes of 255 that end at a page without access, or fewer than `aligned` bytes before it."""
    page = mmap.PAGESIZE
    size = -(-(num_bytes + aligned) // page) * page
    memory = mmap.mmap(-1, size + page)
    _KEPT.append(memory)
    whole = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(whole.ctypes.data + size), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    first = (size - num_bytes) // aligned * aligned
    own = whole[first : first + num_bytes]
    own[:] = 255
    return own


def allocated(num_bytes: int) -> kernels._Scratch:
    """Just the scratch memory that a call needs; `num_bytes` is a quarter more."""
    needed = next(n for n in range(num_bytes * 4 // 5 - 2, num_bytes + 1) if n + n // 4 == num_bytes)
    memory = guarded(needed, aligned=64)
    return kernels._Scratch(memory, memory.ctypes.data, needed)


def main(name: str) -> None:
    """Prints `finished`."""
    library = library_for(name)
    kernels._allocated = allocated
    for kind in (torch.bfloat16, torch.int8, torch.uint8):
        for num_in in (96, 300) if kind != torch.uint8 else (96, 288):
            native = NativeLinear(layer(kind, num_in=num_in, num_out=150), library=library)
            for num_rows in ROWS:
                x = spread(num_rows, num_in)
                for dtype, type_ in ((torch.float32, KINDS["float32"]), (torch.bfloat16, KINDS["bfloat16"])):
                    given, out = (guarded(num_rows * width * dtype.itemsize) for width in (num_in, 150))
                    given[:] = x.to(dtype).view(torch.uint8).numpy().ravel()
                    kernels._held.scratch = kernels._NONE
                    address = ctypes.addressof(native.layer.struct)
                    library.linear(address, given.ctypes.data, type_, num_rows, out.ctypes.data, 1)
                    assert torch.frombuffer(bytearray(out), dtype=dtype).isfinite().all(), (kind, num_in, num_rows)
    for head_dim in (8, 40, 64):
        blocks = stack(torch.int8, library, head_dim=head_dim)
        for num_tokens, num_kept in ((1, 1), (7, 7), (17, 17), (33, 1), (50, 50)):
            x_BTW = np.random.default_rng(0).standard_normal((2, num_tokens, HEADS * head_dim), np.float32)
            kernels._held.scratch = kernels._NONE
            assert np.isfinite(blocks(x_BTW, num_kept)).all(), (head_dim, num_tokens)


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.write("finished\n")
