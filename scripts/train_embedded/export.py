"""Writes the trained parts as a bundle of the product, with a known answer. It trains nothing.

If the picture half was not trained, it is taken from the existing bundle.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.bundle import load_bundle, save_bundle
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.vision.encoder import PictureEncoder
from scripts.train_embedded.decoder_stages import close_gates, open_gates
from scripts.train_embedded.loop import trained
from scripts.train_embedded.picture_stages import load_tower
from scripts.train_embedded.questions import CAPTION_QUESTIONS
from scripts.train_embedded.render import CLEAN, draw_scene
from scripts.train_embedded.sizes import VISION, build_decoder, build_encoder
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
    """Write the model of the latest stages to `bundle` as float16, replacing an existing bundle.

    Raises FileNotFoundError if the decoder was not trained, CheckpointError if there is no picture half.
    """
    decoder = load_decoder(folder)
    close_gates(decoder)
    _check_biases(decoder)
    encoder = load_encoder(folder)
    vision: Mapping[str, Tensor]
    if encoder is None:
        shipped = load_bundle(bundle)
        vision, ood_detector = shipped.vision_state, shipped.ood_detector
    else:
        vision, ood_detector = encoder.state_dict(), None
    model = LoadedModel(
        name="embedded",
        digest="",
        vision_config=VISION,
        vision_state=dict(vision),
        decoder_config=decoder.config,
        decoder_state=decoder.state_dict(),
        tokenizer=Tokenizer.load(folder / "tokenizer.model"),
        dtype=torch.float16,
        sources=(),
        merged=("gates",),
        prompt=CAPTION_QUESTIONS[0],
        card=CARD,
        ood_detector=ood_detector,
    )
    with tempfile.TemporaryDirectory() as scratch:
        # A copy computes the known answer first, so that the bundle at its final path always has one.
        trial = save_bundle(Path(scratch) / "bundle", model=model)
        picture = Path(scratch) / "known_answer.png"
        Image.fromarray(draw_scene(KNOWN_SCENE, np.random.default_rng(7), faults=CLEAN)).save(picture)
        answer = Captioner.load(str(trial), device="cpu", dtype="float32").generate([picture], CAPTION_QUESTIONS[0])[0]
        known = {"prompt": CAPTION_QUESTIONS[0], "text": answer.text, "token_ids": list(answer.token_ids)}
        save_bundle(bundle, model=model, known_answer=known, known_picture=picture, overwrite=True)
    print(f"{bundle}: the known answer is {known['text']!r}")


def load_decoder(folder: Path) -> LlamaAdapterDecoder:
    """The decoder of the latest stage, with open gates. Raises FileNotFoundError if neither stage has run."""
    decoder = build_decoder()
    open_gates(decoder)
    stage = "wording" if (folder / "wording.pt").exists() else "code"
    decoder.load_state_dict(trained(folder, stage, "decoder"))
    return decoder


def load_encoder(folder: Path) -> PictureEncoder | None:
    """The encoder of the latest stages; None if neither stage has run."""
    encoder = build_encoder()
    if (folder / "reading.pt").exists():
        encoder.load_state_dict(trained(folder, "reading", "encoder"))
    elif (folder / "slots.pt").exists():
        load_tower(encoder, folder)
        encoder.query.load_state_dict(trained(folder, "slots", "query"))
    else:
        return None
    return encoder


def _check_biases(decoder: LlamaAdapterDecoder) -> None:
    for layer in decoder.layers:
        bias = layer.get_parameter("attention.qkv.bias")
        if bias[len(bias) // 3 :].any():
            raise ValueError("a bias of keys or values was trained; checkpoints of this family have none")
