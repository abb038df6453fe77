"""The parts as the stages left them, put together, and a quick score of them on features. Nothing is trained here."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.vision.encoder import PictureEncoder
from scripts.train_embedded import features
from scripts.train_embedded.answering import answer_hits
from scripts.train_embedded.code_stage import open_gates
from scripts.train_embedded.packing import Packer, ask_many
from scripts.train_embedded.pictures import labels_to_scene
from scripts.train_embedded.sizes import build_decoder, build_encoder
from scripts.train_embedded.vision_stage import load_tower


def load_trained(folder: Path) -> tuple[PictureEncoder, LlamaAdapterDecoder]:
    """Encoder and decoder of the latest stages, finished or not; the decoder's gates are open for training.

    Raises FileNotFoundError when a stage that is needed has not run.
    """
    encoder, decoder = build_encoder(), build_decoder()
    if (folder / "reading.pt").exists():
        encoder.load_state_dict(torch.load(folder / "reading.pt", weights_only=True)["modules"]["encoder"])
    else:
        load_tower(encoder, folder)
        encoder.query.load_state_dict(torch.load(folder / "slots.pt", weights_only=True)["modules"]["query"])
    open_gates(decoder)
    decoder.load_state_dict(torch.load(folder / "code.pt", weights_only=True)["modules"]["decoder"])
    return encoder, decoder


@torch.no_grad()
def quick_score(
    encoder: PictureEncoder, decoder: LlamaAdapterDecoder, packer: Packer, *, num_pictures: int = 400
) -> dict[str, float]:
    """Exact match by task on pictures never trained on; `pair-` stands before tasks on never-drawn pairs."""
    hits: dict[str, list[bool]] = defaultdict(list)
    for kind in ("check", "pair"):
        seed, draw = features.KINDS[kind]
        rng = np.random.default_rng([seed, 0])
        for _ in range(num_pictures // 20):
            pixels, labels = zip(*[draw(rng) for _ in range(20)], strict=True)
            packed = packer.pack([ask_many(labels_to_scene(label), rng, count=8) for label in labels])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                visual_query = encoder(torch.from_numpy(np.stack(pixels)))
            for task, values in answer_hits(decoder, visual_query, packed).items():
                hits[task if kind == "check" else f"pair-{task}"] += values
    return {task: round(float(np.mean(values)), 4) for task, values in sorted(hits.items())}
