"""Command line of the training: one command per stage, and `all`, which runs what is not finished yet."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from llm.tokenizer import Tokenizer
from scripts.train_embedded import (
    code_stage,
    export,
    features,
    pictures,
    reading_stage,
    samples,
    slot_stage,
    tokens,
    trained,
    vision_stage,
)
from scripts.train_embedded.packing import Packer
from scripts.train_embedded.sizes import build_encoder

STAGES = ("tokenizer", "draw", "vision", "code", "features", "slots", "reading", "export")
MINUTES = {"vision": 17.5, "code": 23.0, "slots": 9.0, "reading": 10.0}
CHUNKS = {"scene": 18, "odd": 6, "check": 1, "pair": 1}
CROWD_CHUNKS = 18


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one stage or all of them; stopped stages go on where they were."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train_embedded", description=__doc__)
    parser.add_argument("stage", choices=(*STAGES, "quick-score", "samples", "all"))
    parser.add_argument(
        "--work", type=Path, default=Path(".work/embedded"), help="pictures, checkpoints (default: %(default)s)"
    )
    parser.add_argument("--bundle", type=Path, default=Path("assets/embedded"), help="default: %(default)s")
    parser.add_argument(
        "--pictures", type=Path, default=Path("assets/pictures"), help="sample pictures (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, help="time budget of the stage, instead of its default")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for stage in STAGES if options.stage == "all" else (options.stage,):
        _run(stage, options)
    return 0


def _run(stage: str, options: argparse.Namespace) -> None:
    folder, drawn, seen = (options.work / name for name in ("run", "pictures", "features"))

    def minutes() -> float:
        return float(options.minutes or MINUTES[stage])

    def tokenizer() -> Tokenizer:
        return Tokenizer.load(folder / "tokenizer.model")

    commands: dict[str, Callable[[], object]] = {
        "tokenizer": lambda: tokens.train_tokenizer(folder / "tokenizer.model"),
        "draw": lambda: [pictures.draw_crowd_chunk(drawn, chunk) for chunk in range(CROWD_CHUNKS)],
        "vision": lambda: vision_stage.run(pictures=drawn, folder=folder, minutes=minutes()),
        "code": lambda: code_stage.run(tokenizer=tokenizer(), folder=folder, minutes=minutes()),
        "features": lambda: _encode(folder, seen),
        "slots": lambda: slot_stage.run(data=seen, folder=folder, minutes=minutes()),
        "reading": lambda: reading_stage.run(folder=folder, minutes=minutes()),
        "quick-score": lambda: print(trained.quick_score(*trained.load_trained(folder), Packer(tokenizer()))),
        "export": lambda: export.export(folder=folder, bundle=options.bundle),
        "samples": lambda: samples.draw_samples(options.pictures),
    }
    print(f"stage {stage}", file=sys.stderr, flush=True)
    commands[stage]()


def _encode(folder: Path, seen: Path) -> None:
    encoder = build_encoder()
    vision_stage.load_tower(encoder, folder)
    for kind, count in CHUNKS.items():
        for chunk in range(count):
            features.encode_chunk(encoder, seen, kind, chunk)


if __name__ == "__main__":
    sys.exit(main())
