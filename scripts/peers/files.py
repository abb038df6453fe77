"""The files that other programs run. They are made once, in a work folder, from the shared weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import get_args

from llama_adapter.app.models.random_model import WiderTokenizer
from llama_adapter.llm.exported.weights_file import ExportPrecision
from scripts.peers.exported import export_tower, quantise_onnx, quantise_openvino
from scripts.peers.gguf_file import write_gguf
from scripts.peers.graphs import FOLDER, MINDIR, export_random
from scripts.peers.llama_cpp import Quantisation, quantise_gguf
from scripts.peers.sizes import place_of
from scripts.peers.weights import bare_tower, decoder_sizes, decoder_state, encoder_state, give_all_tokens


def make_file(file: str, *, work: Path, size: str, num_threads: int) -> Path:
    """The path of the file, which is created if it is missing. Raises MissingPackage, and any error of the packages."""
    place = place_of(file, work=work, size=size)
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    source = _SOURCES.get(file)
    if source is not None:
        make_file(source, work=work, size=size, num_threads=num_threads)
    _MAKERS[file](place, size, num_threads)
    return place


def _write_bf16(place: Path, size: str, num_threads: int) -> None:
    config = decoder_sizes(size)
    write_gguf(decoder_state(config, eos_id=end_id(config.vocab_size)), config, place, dtype="bf16")


def _write_tower(place: Path, size: str, num_threads: int) -> None:
    config = bare_tower(size)
    give_all_tokens()
    export_tower(config, encoder_state(config), place)


def _export_graphs(place: Path, size: str, num_threads: int) -> None:
    export_random(place, size, eos_id=end_id(decoder_sizes(size).vocab_size))


def end_id(vocab_size: int) -> int:
    """The id of the end token in the tokenizer for random weights."""
    return WiderTokenizer(vocab_size).eos_id


_SOURCES: Mapping[str, str] = {
    "q8_0.gguf": "bf16.gguf",
    "q4_0.gguf": "bf16.gguf",
    "tokens-int8.onnx": "tokens.onnx",
    "tokens-int8.xml": "tokens.onnx",
}


def _quantise(kind: Quantisation) -> Callable[[Path, str, int], None]:
    return lambda place, size, threads: quantise_gguf(
        place.with_name("bf16.gguf"), place, kind=kind, num_threads=threads
    )


_MAKERS: Mapping[str, Callable[[Path, str, int], None]] = {
    "bf16.gguf": _write_bf16,
    "q8_0.gguf": _quantise("q8_0"),
    "q4_0.gguf": _quantise("q4_0"),
    "tokens.onnx": _write_tower,
    **dict.fromkeys((MINDIR, *(f"{FOLDER}{precision}" for precision in get_args(ExportPrecision))), _export_graphs),
    "tokens-int8.onnx": lambda place, size, threads: quantise_onnx(place.with_name("tokens.onnx"), place),
    "tokens-int8.xml": lambda place, size, threads: quantise_openvino(place.with_name("tokens.onnx"), place),
}
