"""Command line of the training: one command per stage; `all` makes the bundle."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from llama_adapter.llm.tokenizer import Tokenizer
from scripts.train_embedded import decoder_stages, export, familiar, picture_stages, pictures, samples, tokens
from scripts.train_embedded.sizes import build_encoder

STAGES = ("tokenizer", "draw", "vision", "code", "wording", "features", "slots", "reading", "export", "familiar")
STEPS = {"vision": 10_500, "code": 4_700, "wording": 9_500, "slots": 5_400, "reading": 7_000}
CHUNKS = {"scene": 18, "odd": 6, "check": 1, "pair": 1}
CROWD_CHUNKS = 18


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one stage or several. A stopped stage resumes; a finished stage is skipped."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train_embedded", description=__doc__)
    parser.add_argument("stage", choices=(*STAGES, "samples", "all"))
    parser.add_argument(
        "--work", type=Path, default=Path(".work/embedded"), help="pictures, checkpoints (default: %(default)s)"
    )
    parser.add_argument("--bundle", type=Path, default=Path("assets/embedded"), help="default: %(default)s")
    parser.add_argument(
        "--pictures", type=Path, default=Path("assets/pictures"), help="sample pictures (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, help="training steps of the stage (default: its own number)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}: leave it out for the stage's own number")
    torch.set_num_threads(options.threads)
    for stage in STAGES if options.stage == "all" else (options.stage,):
        print(f"stage {stage}", file=sys.stderr, flush=True)
        _command(stage, options)()
    return 0


def _command(stage: str, options: argparse.Namespace) -> Callable[[], object]:
    folder, drawn, seen = (options.work / name for name in ("run", "pictures", "features"))
    num_steps = STEPS.get(stage, 0) if options.steps is None else options.steps

    def tokenizer() -> Tokenizer:
        return Tokenizer.load(folder / "tokenizer.model")

    commands: dict[str, Callable[[], object]] = {
        "tokenizer": lambda: tokens.train_tokenizer(folder / "tokenizer.model"),
        "draw": lambda: _draw_crowds(drawn),
        "vision": lambda: picture_stages.run_vision(drawn=drawn, folder=folder, num_steps=num_steps),
        "code": lambda: decoder_stages.run_code(tokenizer=tokenizer(), folder=folder, num_steps=num_steps),
        "wording": lambda: decoder_stages.run_wording(
            bundle=options.bundle, tokenizer=tokenizer(), folder=folder, num_steps=num_steps
        ),
        "features": lambda: _encode(folder, seen),
        "slots": lambda: picture_stages.run_slots(data=seen, folder=folder, num_steps=num_steps),
        "reading": lambda: picture_stages.run_reading(folder=folder, num_steps=num_steps),
        "export": lambda: export.export(folder=folder, bundle=options.bundle),
        "familiar": lambda: familiar.run(bundle=options.bundle),
        "samples": lambda: samples.draw_samples(options.pictures),
    }
    return commands[stage]


def _draw_crowds(folder: Path) -> None:
    for chunk in range(CROWD_CHUNKS):
        pictures.draw_crowd_chunk(folder, chunk)


def _encode(folder: Path, seen: Path) -> None:
    encoder = build_encoder()
    picture_stages.load_tower(encoder, folder)
    for kind, count in CHUNKS.items():
        for chunk in range(count):
            picture_stages.encode_chunk(encoder, seen, kind, chunk)


if __name__ == "__main__":
    sys.exit(main())
