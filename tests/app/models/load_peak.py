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

from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.models import random_model
from llama_adapter.app.models.random_model import LlamaSize, RandomLoader, vision_config
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.vision.config import ClipConfig

NAME = "small"
# The vocabulary is that of the embedded model's tokenizer; more would make the embedding as large as several layers.
SIZE = LlamaSize(dim=768, num_layers=12, num_heads=6, ffn_dim=2048, vocab_size=1024)
# The encoder has a third of the weights.
VISION = dataclasses.replace(
    vision_config(SIZE),
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


def main(source: str, dtype: str, precision_name: str) -> None:
    precision: Any = precision_name
    options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "batch_size": 1, "context": 64}
    watch = Watch()
    watch.start()
    if source == "random":
        random_model.LLAMA_SIZES = {NAME: SIZE}
        loader = RandomLoader(name=NAME, precision=precision, vision=VISION)
        parts = assemble_parts(CaptionerSpec(**options), load=loader)
    else:
        kind, _, folder = source.partition("=")
        parts = assemble_parts(CaptionerSpec(**options, **{kind: folder}, precision=precision))
    watch.done.set()
    watch.join()
    stays = anonymous_bytes() - watch.first
    print(json.dumps({"peak": max(watch.most - watch.first, stays), "stays": stays, "model": parts.info.name}))


if __name__ == "__main__":
    main(*sys.argv[1:])
