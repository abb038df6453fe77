"""Pictures as tokens of prompts: models in the form of SmolVLM with random weights, in our engine and in transformers.

transformers makes and saves the model. Each picture has one question; all questions have equally many tokens, so
transformers computes no padding. Answers never end early, because the head's row of the end token is 0.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.llm.picture_format import FRAME, PictureFormat
from llama_adapter.llm.runners.base import DecodePlan
from scripts.common import sample_files
from scripts.peers.packages import require
from scripts.peers.sizes import NUM_ANSWER_TOKENS, Part
from scripts.peers.table import Engine, Figure

_VOCABULARY = 49280
_TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}<end>{% endfor %}"
)
_END, _PICTURE, _WHOLE = "<end>", "<image>", "<global-img>"
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
_SPECIALS = (_END, _PICTURE, FRAME, _WHOLE, *_TILES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Sizes of a model, as its configuration names them. The longer side of a picture becomes `longest` pixels."""

    decoder: Mapping[str, int]
    tower: Mapping[str, int]
    longest: int
    shuffle: int


def _sizes(*common: int, **own: int) -> dict[str, int]:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    return dict(zip(names, common, strict=True)) | own


_SIGLIP = _sizes(12, 768, 3072, 12, image_size=512, patch_size=16)
FORMS: Mapping[str, Form] = {
    "sight-tiny": Form(
        decoder=_sizes(2, 64, 128, 4, num_key_value_heads=2),
        tower=_sizes(2, 32, 48, 2, image_size=32, patch_size=8),
        longest=64,
        shuffle=2,
    ),
    "SmolVLM-256M": Form(
        decoder=_sizes(30, 576, 1536, 9, num_key_value_heads=3), tower=_SIGLIP, longest=1024, shuffle=4
    ),
    "SmolVLM-500M": Form(
        decoder=_sizes(32, 960, 2560, 15, num_key_value_heads=5), tower=_SIGLIP, longest=1024, shuffle=4
    ),
}


def save_random(folder: Path, size: str) -> None:
    """Save a model of a size with its tokenizer, as transformers does. Raises MissingPackage."""
    transformers, form = require("transformers", package="transformers"), FORMS[size]
    words, partial = _words(), folder.with_suffix(".partial")
    decoder = transformers.LlamaConfig(
        **form.decoder,
        vocab_size=_VOCABULARY,
        max_position_embeddings=8192,
        eos_token_id=words.token_to_id(_END),
        tie_word_embeddings=False,
    )
    config = transformers.SmolVLMConfig(
        vision_config=dict(form.tower),
        text_config=decoder.to_dict(),
        image_token_id=words.token_to_id(_PICTURE),
        scale_factor=form.shuffle,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.SmolVLMForConditionalGeneration(config)
    model.lm_head.weight.data[words.token_to_id(_END)] = 0.0
    model.generation_config.eos_token_id = words.token_to_id(_END)
    model.save_pretrained(partial)
    _processor(form).save_pretrained(partial)
    words.save(str(partial / "tokenizer.json"))
    settings = {"eos_token": _END, "chat_template": _TEMPLATE}
    (partial / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    partial.rename(folder)


def _words() -> Any:
    """A tokenizer with a token for each byte; the other tokens of the vocabulary are in no text."""
    tokenizers = require("tokenizers", package="tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    unused = (f"unused{index}" for index in range(_VOCABULARY - len(alphabet) - len(_SPECIALS)))
    vocabulary = {piece: index for index, piece in enumerate((*alphabet, *unused))}
    words = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    words.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in _SPECIALS])
    return words


def _processor(form: Form) -> Any:
    kind = require("transformers.models.smolvlm.image_processing_pil_smolvlm", package="transformers")
    return kind.SmolVLMImageProcessorPil(
        size={"longest_edge": form.longest},
        max_image_size={"longest_edge": form.tower["image_size"]},
        return_row_col_info=True,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def _questions(first: int, count: int) -> tuple[list[Path], list[str]]:
    files = sample_files(first + count)[first:]
    return files, [f"What is in picture {chr(65 + index)}?" for index in range(count)]


def _figures(
    count: int, *, prompt_tokens: int, seconds: float, encoder: float, prefill: float, decode: float
) -> list[Figure]:
    """Rates of a run, from the seconds of the whole and of its parts."""
    rates: dict[Part, float] = {
        "sight": count / seconds,
        "sight-encoder": count / encoder,
        "sight-prefill": prompt_tokens / prefill,
        "sight-decode": count * (NUM_ANSWER_TOKENS - 1) / decode,
    }
    return [Figure(part=part, batch=count, rate=rate, spent_s=seconds) for part, rate in rates.items()]


class OurSight:
    """The captioner."""

    def __init__(self, folder: Path, engine: Engine, *, num_rows: int) -> None:
        self._captioner = Captioner.load(
            folder, batch_size=num_rows, device="cpu", dtype="float32", precision=engine.precision
        )
        self._spent = {"prefill": 0.0, "decode": 0.0}
        runner = self._captioner._engine._runner
        compute = runner.run

        def run(plan: Any) -> Any:
            started = time.perf_counter()
            result = compute(plan)
            self._spent["decode" if isinstance(plan, DecodePlan) else "prefill"] += time.perf_counter() - started
            return result

        runner.run = run  # type: ignore[method-assign]

    def run(self, first: int, count: int) -> tuple[list[Figure], list[list[int]]]:
        """Figures and ids of `count` sample pictures, from the one with the number `first` on."""
        files, questions = _questions(first, count)
        clock, self._spent = self._captioner.profile_clock(), {"prefill": 0.0, "decode": 0.0}
        started = time.perf_counter()
        answers = self._captioner.generate(
            list(map(str, files)), questions, clock=clock, max_new_tokens=NUM_ANSWER_TOKENS
        )
        seconds, tokens = time.perf_counter() - started, sum(answer.prompt_tokens for answer in answers)
        figures = _figures(count, prompt_tokens=tokens, seconds=seconds, encoder=clock.seconds["clip"], **self._spent)
        return figures, [list(answer.token_ids) for answer in answers]


class HuggingFaceSight:
    """`generate` of transformers with all pictures in one batch."""

    def __init__(self, folder: Path, form: Form) -> None:
        transformers = require("transformers", package="transformers")
        self._words, self._processor = _words(), _processor(form)
        self._model = transformers.SmolVLMForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._format = PictureFormat(
            token=_PICTURE,
            token_id=self._words.token_to_id(_PICTURE),
            tokens_each=(form.tower["image_size"] // form.tower["patch_size"] // form.shuffle) ** 2,
            frame=FRAME,
        )
        inner, marks = self._model.model, list[float]()  # the tower's start, the connector's end, and each step's end
        inner.vision_model.register_forward_pre_hook(lambda *_: marks.append(time.perf_counter()))
        for module in (inner.connector, self._model.lm_head):
            module.register_forward_hook(lambda *_: marks.append(time.perf_counter()))
        self._marks = marks

    @torch.inference_mode()
    def run(self, first: int, count: int) -> tuple[list[Figure], list[list[int]]]:
        """As of `OurSight`."""
        files, questions = _questions(first, count)
        self._marks.clear()
        started = time.perf_counter()
        given = self._processor(images=[[Image.open(file).convert("RGB")] for file in files], return_tensors="pt")
        grids = [
            (int(rows[0]), int(columns[0])) for rows, columns in zip(given.pop("rows"), given.pop("cols"), strict=True)
        ]
        texts = [f"{self._format.text(grid)}{question}{_END}" for grid, question in zip(grids, questions, strict=True)]
        ids_BS = torch.tensor([self._words.encode(text, add_special_tokens=False).ids for text in texts])
        whole_BS = self._model.generate(
            input_ids=ids_BS,
            attention_mask=torch.ones_like(ids_BS),
            max_new_tokens=NUM_ANSWER_TOKENS,
            do_sample=False,
            pad_token_id=0,
            **given,
        )
        seconds = time.perf_counter() - started
        encoding, encoded, prefilled, *_, decoded = self._marks
        figures = _figures(
            count,
            prompt_tokens=ids_BS.numel(),
            seconds=seconds,
            encoder=encoded - encoding,
            prefill=prefilled - encoded,
            decode=decoded - prefilled,
        )
        return figures, whole_BS[:, ids_BS.shape[1] :].tolist()


def measure_sight(opened: OurSight | HuggingFaceSight, count: int, *, exact: Path | None) -> list[Figure]:
    """Figures of one run over `count` pictures, after a run over another picture.

    `exact` is the file of the float32 ids. It is written if it is missing. Raises RuntimeError if its ids are others.
    """
    opened.run(count, 1)
    figures, ids = opened.run(0, count)
    if exact is not None:
        if not exact.exists():
            exact.write_text(json.dumps(ids), encoding="utf-8")
        if json.loads(exact.read_text(encoding="utf-8")) != ids:
            raise RuntimeError(f"the ids differ from those in {exact.name}")
    return figures
