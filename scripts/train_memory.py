"""Trains a random model of a given size for a few steps, and prints predicted and measured memory and time.

python -m scripts.train_memory 160M --sets bias --steps 20
"""

import argparse
import dataclasses
import gc
import json
import os
import time
from pathlib import Path

import torch

from llama_adapter.app.learning.labelled.example import Example
from llama_adapter.app.learning.training.asking import TrainExample
from llama_adapter.app.learning.training.batches import Microbatch
from llama_adapter.app.learning.training.job import TrainingChoice
from llama_adapter.app.learning.training.model import TrainableModel
from llama_adapter.app.learning.training.plan import Shapes, plan_step
from llama_adapter.app.learning.training.planning import measured_rates
from llama_adapter.app.learning.training.ranks import Distributed, OneRank
from llama_adapter.app.learning.training.sources import TrainingSources, new_adapter
from llama_adapter.app.learning.training.stepping import NamedAdamW, Stepper
from llama_adapter.app.models.checkpoints import DEFAULT_CONTEXT
from llama_adapter.app.models.random_model import (
    VOCABULARY,
    WiderTokenizer,
    decoder_config,
    parse_size,
    random_tensors,
    vision_config,
)
from llama_adapter.app.pictures.inputs import PictureInput, QuestionFields
from llama_adapter.llm.training.frozen import find_kernels
from llama_adapter.llm.training.layout import IGNORED
from llama_adapter.runtime.devices import DTYPES, open_backend
from llama_adapter.vision.encoder import ClipVisionTower
from llama_adapter.vision.towers import ClipSource
from scripts.common import process_mib
from scripts.training_programs import random_llama

# D model width, F feed-forward width, V vocabulary; B rows, S tokens

_EXAMPLE = TrainExample(
    example=Example(
        item=PictureInput(source=None, label=""),
        question=QuestionFields(),
        task="answer",
        answers=("",),
        place="random tokens",
    ),
    prompt="",
    rows=(),
)


def main() -> None:
    """Print the measurement as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", nargs="?", default="160M")
    parser.add_argument("--sets", default="bias")
    parser.add_argument("--dtype", default="float32", choices=tuple(DTYPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--labels", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    choice = TrainingChoice(sets=tuple(options.sets.split(",")))
    backend = open_backend(options.device)
    dtype = DTYPES[options.dtype]
    size = parse_size(options.size)
    shapes = Shapes(
        decoder=decoder_config(size),
        vision=vision_config(size),
        kinds=choice.kinds,
        lora_rank=choice.lora_rank,
        dtype=dtype,
        rows=options.rows,
        tokens=options.tokens,
        labels=options.labels,
        checkpointing=options.checkpointing,
        is_scored=False,
        device_type=backend.device.type,
    )
    plan, kernels = plan_step(shapes), find_kernels(backend.device.type, dtype)
    if kernels is not None:
        plan = plan.packed()
    rates = measured_rates(backend, decoder=shapes.decoder, dtype=dtype)
    before = _bytes("VmRSS")
    model = TrainableModel(
        random_sources(options.size, choice), choice, dtype=dtype, device=backend.device, seed=0, kernels=kernels
    )
    model.decoder.checkpoint_layers = options.checkpointing
    # Real source tensors are mapped from files, so they are dropped here. The adapter stays, as in a real run.
    model.sources = dataclasses.replace(
        model.sources, llama=dataclasses.replace(model.sources.llama, tensors={}), clip=None
    )
    gc.collect()
    backend.empty_caches()
    loaded = _bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    seconds = _train(model, options.steps, rows=options.rows, tokens=options.tokens, labels=options.labels)
    peak = _bytes("VmHWM")
    seconds.sort()
    predicted_s = plan.seconds(**dataclasses.asdict(rates))
    found = {
        "size": options.size,
        "sets": options.sets,
        "dtype": options.dtype,
        "rows": options.rows,
        "tokens": options.tokens,
        "checkpointing": options.checkpointing,
        "threads": torch.get_num_threads(),
        "trained": sum(model.counts().values()),
        "static_mb": {"predicted": _mb(plan.frozen + plan.trained // 3), "measured": _mb(loaded - before)},
        "peak_mb": {"predicted": _mb(plan.total), "measured": _mb(peak - before)},
        "peak_ratio": round(plan.total / (peak - before), 3),
        "step_s": {"predicted": round(predicted_s, 3), "measured": round(seconds[len(seconds) // 2], 3)},
        "gflop_a_step": round(plan.flops / 1e9, 1),
        "gflop_per_s": round(rates.flops_per_s / 1e9, 1),
        "frozen_gflop_a_step": round(plan.frozen_flops / 1e9, 1),
        "frozen_gflop_per_s": round(rates.frozen_flops_per_s / 1e9, 1),
        "gb_a_step": round(plan.traffic / 1e9, 2),
        "gb_per_s": round(rates.bytes_per_s / 1e9, 1),
    }
    print(json.dumps(found, indent=1))


def random_sources(name: str, choice: TrainingChoice) -> TrainingSources:
    """A LLaMA of the given size and a CLIP with random weights, and a new adapter, in memory."""
    size = parse_size(name)
    vision, llama = vision_config(size), random_llama(name)
    with torch.device("meta"):
        tower = ClipVisionTower(vision.clip)
    drawn = random_tensors(tower.state_dict(prefix="clip."), dtype=torch.float32)
    clip = ClipSource(name="random CLIP", config=vision.clip, tensors=dict(drawn))
    return TrainingSources(
        name=f"random {name}",
        llama=llama,
        adapter=new_adapter(llama, choice, clip=clip, seed=0),
        clip=clip,
        visual_heads=choice.visual_heads,
        channel_order="rgb",
        tokenizer=WiderTokenizer(llama.config.vocab_size),
        context=DEFAULT_CONTEXT,
    )


def _train(model: TrainableModel, num_steps: int, *, rows: int, tokens: int, labels: int) -> list[float]:
    """Seconds of each step."""
    ranks = OneRank()
    optimiser = NamedAdamW(model.trained(), no_decay=model.no_decay(), weight_decay=0.02)
    stepper = Stepper(Distributed(model, kind="one", ranks=ranks), optimiser, ranks=ranks, clip=1.0)
    encoded = model.encode_nothing().cpu().expand(rows, -1, -1)
    generator = torch.Generator().manual_seed(0)
    seconds = []
    for _ in range(num_steps):
        tokens_BS = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
        labels_BS = tokens_BS.clone()
        labels_BS[:, : tokens - labels] = IGNORED
        part = Microbatch(examples=(_EXAMPLE,) * rows, rows=(), tokens_BS=tokens_BS, labels_BS=labels_BS)
        started = time.perf_counter()
        stepper.step([(part, encoded)], num_labels=rows * labels, lr=1e-4)
        seconds.append(time.perf_counter() - started)
    return seconds


def _bytes(name: str) -> float:
    """A size in /proc/self/status: `VmRSS` is the resident memory, `VmHWM` its peak."""
    return process_mib(os.getpid(), name) * 2**20


def _mb(num_bytes: float) -> float:
    return round(num_bytes / 1e6, 1)


if __name__ == "__main__":
    main()
