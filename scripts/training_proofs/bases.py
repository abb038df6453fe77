"""The same adapter training over two decoders, with one picture encoder: the embedded model's and SmolLM2-135M.

Both start with the tower and the visual blocks of the embedded model, and with the same method of drawing the rest of
the adapter at random. So neither decoder knows what the visual query means.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from llama_adapter.app.learning.training.job import TrainingChoice
from llama_adapter.app.learning.training.sources import new_adapter
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.checkpoints import open_clip, open_llama_parts
from llama_adapter.app.models.llama_folder import find_llama
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.vision.weights import visual_tensors
from scripts.train_embedded.pictures import PROOF_SEED
from scripts.train_embedded.render import draw_scene
from scripts.train_embedded.world import sample_scene
from scripts.training_proofs.new_questions import SPLITS, write_table

QUESTION = "What color is the object?"
LEVELS = (0.5, 0.8, 0.95)  # scores whose first step is reported
_SEED = 3  # of the drawings


def write_colors(folder: Path, *, counts: tuple[int, int, int]) -> Path:
    """Write drawings of one object with a question about its colour; returns the table."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, (split, count) in enumerate(zip(SPLITS, counts, strict=True)):
        rng = np.random.default_rng([PROOF_SEED, _SEED, number])
        for index in range(count):
            scene = sample_scene(rng, num_objects=1)
            name = f"pictures/{split}-{index:04d}.png"
            Image.fromarray(draw_scene(scene, rng)).save(folder / name)
            rows.append({"picture": name, "split": split, "question": QUESTION, "answer": scene[0].color})
    write_table(folder / "colors.jsonl", rows)
    return folder / "colors.jsonl"


def write_start(llama_dir: Path, path: Path) -> None:
    """Write an adapter for a LLaMA: the embedded model's visual blocks, and all other parts drawn as `train` does."""
    eye = load_bundle(embedded_model(), dtype=torch.float32)
    sizes = eye.vision_config.query
    choice = TrainingChoice(
        num_queries=sizes.num_queries,
        visual_width=sizes.width,
        visual_depth=sizes.depth,
        visual_heads=sizes.num_heads,
    )
    _, llama, _ = open_llama_parts(find_llama(llama_dir), adapter=None, clip=None)
    new = new_adapter(llama, choice, clip=open_clip(str(embedded_model())), seed=0)
    state = {name.removeprefix("query."): tensor.float() for name, tensor in eye.vision_state.items()}
    known = visual_tensors(state, depth=sizes.depth)
    # The projection to the decoder's width comes last, so it is new too.
    kept = {name: tensor for name, tensor in known.items() if not name.startswith("visual_proj")}
    tensors = {**new.visual, **kept, "adapter_query.weight": new.queries}
    tensors |= {f"llama.{name}": tensor for name, tensor in new.llama.items()}
    torch.save({"model": tensors, "config": {"visual_heads": sizes.num_heads}}, path)


def first_steps(curve: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """The first evaluated step at which the score is at least each of `LEVELS`; None: it was not reached."""
    return [
        next((int(point["step"]) for point in curve if point.get("validation_score", 0.0) >= level), None)
        for level in LEVELS
    ]
