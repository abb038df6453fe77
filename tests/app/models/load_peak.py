"""Loads a model in a separate process and prints the anonymous memory that it takes: the peak, and the final size.

Anonymous memory cannot be dropped, unlike pages of mapped files, which can be read again. Usage: `python -m` with a
source (random, model=FOLDER or llama_dir=FOLDER), a dtype and a precision.
"""

import dataclasses
import json
import sys
import threading
from pathlib import Path
from typing import Any

from llama_adapter.app.captioning.assemble import ModelLoader, assemble_parts
from llama_adapter.app.models import random_model
from llama_adapter.app.models.random_model import LlamaSize, RandomLoader, parse_size, vision_config
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.schemes import PRECISIONS, Precision
from llama_adapter.vision.config import ClipConfig

NAME = "768x12x6x2048"
VOCABULARY = 1024  # as the embedded model's tokenizer; more would make the embedding as large as several layers
# The encoder has a third of the weights.
VISION = dataclasses.replace(
    vision_config(parse_size(NAME)),
    clip=ClipConfig(patch_size=56, width=384, num_layers=2, num_heads=6, output_dim=768),
)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Watch(threading.Thread):
    """Samples the memory every two milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.most = anonymous_bytes()
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.002):
            self.most = max(self.most, anonymous_bytes())


def parse_small(name: str) -> LlamaSize:
    """As `parse_size`, with the vocabulary of the embedded model's tokenizer."""
    return dataclasses.replace(parse_size(name), vocab_size=VOCABULARY)


def random_loader(precision: Precision) -> ModelLoader:
    random_model.parse_size = parse_small
    return RandomLoader(name=NAME, precision=precision, vision=VISION)


def main(source: str, dtype: str, precision_name: str) -> None:
    precision = next(name for name in PRECISIONS if name == precision_name)
    options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "batch_size": 1, "context": 64}
    watch = Watch()
    watch.start()
    if source == "random":
        parts = assemble_parts(CaptionerSpec(**options), load=random_loader(precision))
    else:
        kind, _, folder = source.partition("=")
        parts = assemble_parts(CaptionerSpec(**options, **{kind: folder}, precision=precision))
    watch.done.set()
    watch.join()
    stays = anonymous_bytes() - watch.first
    print(json.dumps({"peak": max(watch.most - watch.first, stays), "stays": stays, "model": parts.info.name}))


if __name__ == "__main__":
    main(*sys.argv[1:])
