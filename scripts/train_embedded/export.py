"""Writes the trained parts as a bundle of the product, with a known answer. Trains nothing."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.bundle import save_bundle
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.vision.encoder import PictureEncoder
from scripts.train_embedded.code_stage import close_gates, open_gates
from scripts.train_embedded.loop import trained
from scripts.train_embedded.questions import CAPTION_QUESTIONS
from scripts.train_embedded.render import CLEAN, draw_scene
from scripts.train_embedded.sizes import VISION, build_decoder, build_encoder
from scripts.train_embedded.vision_stage import load_tower
from scripts.train_embedded.world import Thing

CARD = (
    "A tiny LLaMA-Adapter V2 model trained from scratch on drawn pictures of one to three plain objects. It captions "
    "such pictures and answers questions about them, and knows nothing else. See docs/embedded-model.md."
)
KNOWN_SCENE = (
    Thing(shape="star", color="red", size="large", cell=3, x=44, y=116, radius=36),
    Thing(shape="circle", color="blue", size="small", cell=2, x=183, y=42, radius=20),
)


def export(*, folder: Path, bundle: Path) -> None:
    """Write the model of the latest stages to `bundle` as float16, replacing it."""
    encoder, decoder = load_trained(folder)
    close_gates(decoder)
    _check_biases(decoder)
    model = LoadedModel(
        name="embedded",
        digest="",
        vision_config=VISION,
        vision_state=encoder.state_dict(),
        decoder_config=decoder.config,
        decoder_state=decoder.state_dict(),
        tokenizer=Tokenizer.load(folder / "tokenizer.model"),
        dtype=torch.float16,
        sources=(),
        merged=("gates",),
        prompt=CAPTION_QUESTIONS[0],
        card=CARD,
    )
    with tempfile.TemporaryDirectory() as scratch:
        # Answered by a copy first, so that the bundle in place always has its known answer.
        trial = save_bundle(Path(scratch) / "bundle", model=model)
        picture = Path(scratch) / "known_answer.png"
        Image.fromarray(draw_scene(KNOWN_SCENE, np.random.default_rng(7), faults=CLEAN)).save(picture)
        answer = Captioner.load(str(trial), device="cpu", dtype="float32").generate([picture], CAPTION_QUESTIONS[0])[0]
        known = {"prompt": CAPTION_QUESTIONS[0], "text": answer.text, "token_ids": list(answer.token_ids)}
        save_bundle(bundle, model=model, known_answer=known, known_picture=picture, overwrite=True)
    print(f"{bundle}: the known answer is {known['text']!r}")


def load_trained(folder: Path) -> tuple[PictureEncoder, LlamaAdapterDecoder]:
    """Encoder and decoder of the latest stages, with gates open. Raises FileNotFoundError if a stage has not run."""
    encoder, decoder = build_encoder(), build_decoder()
    if (folder / "reading.pt").exists():
        encoder.load_state_dict(trained(folder, "reading", "encoder"))
    else:
        load_tower(encoder, folder)
        encoder.query.load_state_dict(trained(folder, "slots", "query"))
    open_gates(decoder)
    decoder.load_state_dict(trained(folder, "code", "decoder"))
    return encoder, decoder


def _check_biases(decoder: LlamaAdapterDecoder) -> None:
    for layer in decoder.layers:
        bias = layer.get_parameter("attention.qkv.bias")
        if bias[len(bias) // 3 :].any():
            raise ValueError("a bias of keys or values was trained; checkpoints of this family have none")
