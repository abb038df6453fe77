"""Prints how far we are from the reference, tensor by tensor: `python -m tests.parity.report`."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image

from llama_adapter.llm.model.loss import next_token_loss
from llama_adapter.vision.encoder import PIXEL_MEAN, PIXEL_STD
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.preprocess import preprocess
from tests.llm.toys import kept_distribution
from tests.parity.golden import ADAPTERS, CASES, GENERATE, GOLDEN, PICTURES, causal, max_difference, model, pixels
from tests.parity.golden import tensors as golden_tensors
from tests.parity.test_decoder import WITH_STEPS, generated, logits_along

LLAMA_FORMS = ("LLaMA/TINY", "LLaMA/TINY-2SHARD", "LLaMA-HF/TINY")


def rows() -> Iterator[tuple[str, str]]:
    """What was compared, and the largest absolute difference or the share that is equal."""
    yield "pixels after resize and crop, 9 pictures, in levels of 255", f"{pixel_difference()}"
    yield "normalised tensor, 8x8 corners", f"{corner_difference():.1e}"
    encoder = model("BIAS-TINY").encoder
    golden = golden_tensors("vision_BIAS-TINY")
    named = [name for name in golden if name.startswith("clip_features/")]
    worst = max(max_difference(encoder.features(pixels([name.split("/")[1]]))[0], golden[name]) for name in named)
    yield "CLIP features, all 257 tokens", f"{worst:.1e}"
    for adapter in ADAPTERS:
        ours = model(adapter).encoder(pixels(PICTURES))
        yield (
            f"visual query, {adapter}",
            f"{max_difference(ours, golden_tensors(f'vision_{adapter}')['visual_query']):.1e}",
        )
    yield "visual query, BIAS-TINY, read as by OpenCV (bgr), 9 pictures", f"{opencv_difference():.1e}"
    for kind in ("bias", "lora", "caption", "trainckpt"):
        pairs = [pair for name in WITH_STEPS if name.startswith(kind) for pair in logits_along(GENERATE[name])]
        worst = max(max_difference(ours, theirs) for ours, theirs in pairs)
        yield f"logits of prefill and every step, {kind} cases (standard deviation 1.5)", f"{worst:.1e}"
    for dtype in (torch.bfloat16, torch.float16):
        for name in ("bias_b3_mixed", "lora_b3_mixed"):
            worst = max(max_difference(ours, theirs) for ours, theirs in logits_along(GENERATE[name], dtype=dtype))
            yield f"logits in {str(dtype).removeprefix('torch.')}, {name}", f"{worst:.2f}"
    for form in LLAMA_FORMS:
        equal = sum(generated(case, num_slots=3, llama=form) == case["output_ids"] for case in GENERATE.values())
        yield f"greedy ids of all cases, {form}", f"{equal} of {len(GENERATE)} equal"
    for case in CASES["loss"]:
        yield f"loss, {case['name']}, relative", f"{loss_difference(case):.1e}"
    yield "distribution after temperature and top-p, 10 cases", f"{sampling_difference():.1e}"


def pixel_difference() -> int:
    differences = []
    for picture in PICTURES:
        ours = preprocess(load_picture(GOLDEN / "images" / picture, orientation="ignore").image)
        differences.append(np.abs(ours.astype(int) - pixels([picture])[0].numpy().astype(int)).max())
    return int(max(differences))


def opencv_difference() -> float:
    encoder = model("BIAS-TINY", channel_order="bgr").encoder
    read = [load_picture(GOLDEN / "images" / picture, orientation="upright").image for picture in PICTURES]
    ours = encoder(torch.from_numpy(np.stack([preprocess(image, convert="first") for image in read])))
    return max_difference(ours, golden_tensors("vision_BIAS-TINY")["visual_query_opencv_style"])


def corner_difference() -> float:
    worst = 0.0
    for name, corner in golden_tensors("preprocess").items():
        picture = load_picture(GOLDEN / "images" / name.removeprefix("corner/"), orientation="ignore")
        assert isinstance(picture.image, Image.Image)
        values = preprocess(picture.image)[:8, :8].astype(np.float32) / 255
        ours = (values - np.array(PIXEL_MEAN, np.float32)) / np.array(PIXEL_STD, np.float32)
        worst = max(worst, float(np.abs(ours.transpose(2, 0, 1) - corner.numpy()).max()))
    return worst


def loss_difference(case: dict[str, Any]) -> float:
    golden = golden_tensors(f"loss_{case['name']}")
    encoder, decoder = model(case["adapter"])
    tokens = golden["tokens"]
    length = tokens.shape[1]
    prefix = decoder.project_prefix(encoder(pixels(case["images"])))
    logits = decoder.logits(decoder(tokens, torch.arange(length)[None], causal(length), prefix))
    ours, theirs = float(next_token_loss(logits, golden["labels"])), float(golden["loss"])
    return abs(ours - theirs) / theirs


def sampling_difference() -> float:
    golden = golden_tensors("sampling")
    worst = 0.0
    for case in CASES["sampling"]:
        name, temperature = case["name"], case["temperature"]
        drawn = (
            golden[f"{name}/probs_in"] if temperature is None else (golden[f"{name}/logits"] / temperature).softmax(-1)
        )
        worst = max(worst, max_difference(kept_distribution(drawn, top_p=case["top_p"]), golden[f"{name}/probs"]))
    return worst


if __name__ == "__main__":
    for what, figure in rows():
        print(f"{what:<75} {figure}")
