"""Loads models, each in a new process, and prints the anonymous memory that it takes: the peak, and the final size.

Anonymous memory cannot be dropped, unlike pages of mapped files, which can be read again. Usage: `python -m` with a
dtype, and a source (random, model=FOLDER or llama_dir=FOLDER) and a precision for each model. The processes are forks
of one that has imported what they need, which takes longer than loading.
"""

import dataclasses
import json
import os
import sys
import threading
import traceback
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


def load(source: str, dtype: str, precision_name: str) -> None:
    """Load a model and print its line."""
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
    taken = {"peak": max(watch.most - watch.first, stays), "stays": stays, "model": parts.info.name}
    print(json.dumps(taken), flush=True)


def main(dtype: str, *models: str) -> None:
    for source, precision in zip(models[::2], models[1::2], strict=True):
        child = os.fork()
        if not child:
            try:
                load(source, dtype, precision)
            except BaseException:  # no further model is loaded in this process
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"{source} in {precision} was not loaded")


if __name__ == "__main__":
    main(*sys.argv[1:])
