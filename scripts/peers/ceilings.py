"""What this machine can do at most, as the shares in the report need it: reading, and products of packed layers."""

import time
from collections.abc import Iterator

from llama_adapter.app.measuring.ceilings import measure_bandwidth, measure_matmul
from llama_adapter.app.measuring.roofline import decoder_shapes, encoder_shapes
from llama_adapter.app.models.spec import Precision
from llama_adapter.runtime.devices.backend import DTYPES, open_backend
from scripts.peers.measuring import Figure
from scripts.peers.sizes import ENCODERS
from scripts.peers.weights import bare_tower, decoder_sizes

PRECISIONS: tuple[tuple[str, str, Precision], ...] = (
    ("float32", "float32", "float"),
    ("bfloat16", "bfloat16", "float"),
    ("int8", "float32", "int8"),
)


def measure_ceilings(size: str) -> Iterator[tuple[str, Figure]]:
    """Names and figures: `read`, bytes a second, and `matmul-...` of the layers of that size, FLOPs a second."""
    backend = open_backend("cpu")
    started = time.perf_counter()
    yield "read", _figure(measure_bandwidth(backend), started=started)
    is_encoder = size in ENCODERS
    shapes = encoder_shapes(bare_tower(size)) if is_encoder else decoder_shapes(decoder_sizes(size))
    for name, dtype, precision in PRECISIONS:
        started = time.perf_counter()
        rate = measure_matmul(backend, shapes=shapes, dtype=DTYPES[dtype], precision=precision)
        yield f"matmul-{name}", _figure(rate, started=started)


def _figure(rate: float, *, started: float) -> Figure:
    return Figure(part="ceiling", batch=1, rate=rate, spent_s=time.perf_counter() - started)
