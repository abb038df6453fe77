"""Captioners on exported decoders give the same answers as torch, and refuse files that do not belong together."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from llama_adapter import Captioner, GraphError, LlamaAdapterError, TextDelta, UsageError
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.llm.exported.card import read_card
from tests.app.exported import exported_embedded, exported_golden
from tests.app.golden import model_options
from tests.parity.exported import choice_limit
from tests.parity.golden import GOLDEN, GROUPS, batch
from tests.parity.test_captioner import answer

SAMPLES = sorted(sample_pictures().glob("*.[pj][np]g"))
PROMPTS = ["Generate caption of this image", "What colour is the background?", "How many shapes are there?"]
SAMPLE_PROMPTS = [PROMPTS[number % 3] for number in range(len(SAMPLES))]  # prompts of different lengths
DRAWN: Any = {
    "temperature": 5.0,
    "top_p": 0.95,
    "top_k": 50,
    "seed": 4,
    "max_new_tokens": 20,
}  # so that other tokens than the most likely ones are drawn
CHOICES = ["red", "a very light grey", "white"]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("batch_size", [1, 5, 16])
@pytest.mark.proves("token ids of the reference", "ONNX")
@pytest.mark.proves("Meta LLaMA and adapter", "ONNX")
@pytest.mark.proves("BIAS adapters", "ONNX")
@pytest.mark.proves("LORA adapters", "ONNX")
@pytest.mark.proves("CAPTION adapters (one query)", "ONNX")
def test_golden_cases_have_the_ids_of_the_reference(group: str, batch_size: int) -> None:
    case = batch(group, num_rows=batch_size)
    options = {**model_options(case["adapter"]), "exif": "ignore", "transparency": "ignore"}
    options["context"] = case["max_seq_len"]
    captioner = Captioner.load(decoder=exported_golden(case["adapter"]), batch_size=batch_size, **options)

    expected = list(zip(case["output_ids"], case["output_text"], strict=True))
    assert answer(captioner, case, as_ids=False) == expected


@pytest.fixture(scope="module")
def torchs() -> Captioner:
    return Captioner.load(dtype="float32", batch_size=5)


@pytest.fixture(scope="module")
def wanted(torchs: Captioner) -> tuple[list[Any], list[Any]]:
    """torch's results: greedy tokens and unfamiliarity for each sample picture, and sampled tokens for half of them."""
    best = torchs.generate(SAMPLES, SAMPLE_PROMPTS)
    drawn = torchs.generate(SAMPLES[:16], SAMPLE_PROMPTS[:16], **DRAWN)
    return [(one.token_ids, one.unfamiliar) for one in best], [one.token_ids for one in drawn]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 5, 16])
@pytest.mark.proves("embedded model", "ONNX")
@pytest.mark.proves("streaming", "ONNX")
def test_sample_pictures_have_torchs_answers_streamed_or_not(
    torchs: Captioner, wanted: tuple[list[Any], list[Any]], batch_size: int
) -> None:
    captioner = Captioner.load(decoder=exported_embedded(), batch_size=batch_size)

    made = captioner.generate(SAMPLES, SAMPLE_PROMPTS)
    drawn = captioner.generate(SAMPLES[:16], SAMPLE_PROMPTS[:16], **DRAWN)
    assert [(one.token_ids, one.unfamiliar) for one in made] == wanted[0]
    assert [one.token_ids for one in drawn] == wanted[1]
    pieces = [event.text for event in captioner.stream(SAMPLES[:1], PROMPTS[1]) if isinstance(event, TextDelta)]
    assert "".join(pieces) == torchs.ask(SAMPLES[0], PROMPTS[1]).text


def test_choices_have_torchs_probabilities(torchs: Captioner) -> None:
    captioner = Captioner.load(decoder=exported_embedded(), batch_size=5)

    wanted = torchs.generate(SAMPLES[:7], PROMPTS[1], choices=CHOICES)
    made = captioner.generate(SAMPLES[:7], PROMPTS[1], choices=CHOICES)

    for one, other in zip(made, wanted, strict=True):
        assert one.choice == pytest.approx(other.choice, abs=choice_limit())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "int8"])
@pytest.mark.proves("float16", "ONNX")
@pytest.mark.proves("int8 weights", "ONNX")
def test_fewer_bits_keep_the_answers_of_the_embedded_model(torchs: Captioner, precision: str) -> None:
    captioner = Captioner.load(decoder=exported_embedded(precision=precision), batch_size=16)

    wanted = [one.text for one in torchs.generate(SAMPLES)]
    made = [one.text for one in captioner.generate(SAMPLES)]

    same = sum(one == other for one, other in zip(made, wanted, strict=True))
    assert same >= 0.9 * len(SAMPLES)
    assert captioner.info.precision == ("float" if precision == "float16" else precision)


@pytest.mark.proves("text without a picture", "ONNX")
def test_texts_without_a_picture_are_answered(torchs: Captioner) -> None:
    captioner = Captioner.load(decoder=exported_embedded())

    for text_prefix in ("none", "zeros"):
        wanted = torchs.generate_text("Name a colour.", text_prefix=text_prefix)
        assert captioner.generate_text("Name a colour.", text_prefix=text_prefix)[0].token_ids == wanted[0].token_ids


@pytest.mark.slow
def test_the_whole_command_runs_without_torch() -> None:
    program = """
import sys
from llama_adapter.__main__ import main
code = main(["caption", *sys.argv[2:], "--decoder", sys.argv[1], "--batch-size", "4"])
print(code, sorted(name for name in sys.modules if name.partition(".")[0] == "torch"), file=sys.stderr)
"""
    pictures = [str(picture) for picture in SAMPLES[:5]]
    ran = subprocess.run(
        [sys.executable, "-c", program, exported_embedded(), *pictures], capture_output=True, text=True, check=True
    )

    assert ran.stderr.splitlines()[-1] == "0 []"
    records = {record["picture"]: record["text"] for record in map(json.loads, ran.stdout.splitlines())}
    wanted = Captioner.load(dtype="float32").generate(pictures)
    assert records == {str(one.picture): one.text for one in wanted}


@pytest.mark.slow
def test_a_server_runs_without_torch() -> None:
    program = """
import sys
from llama_adapter.app.serving.online.service import load_warm
from llama_adapter.app.serving.http_api.api import create_api, open_batches
from llama_adapter.app.serving.http_api.metrics import Metrics
from llama_adapter.app.serving.http_api.running import run
from llama_adapter.app.models.spec import CaptionerSpec
load_warm(CaptionerSpec(decoder=sys.argv[1]), tell=print).close()
print(sorted(name for name in sys.modules if name.partition(".")[0] == "torch"))
"""
    command = [sys.executable, "-c", program, exported_embedded()]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def damaged(folder: Path, change: Callable[[Path], object]) -> str:
    change(folder)
    with pytest.raises(LlamaAdapterError) as caught:
        Captioner.load(decoder=str(folder))
    return f"{caught.value.message} [{caught.value.hint}]".replace(str(folder), "FOLDER")


def with_card(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: dataclasses.replace(read_card(folder), **changes).write(folder)


def change_card(folder: Path) -> None:
    path = folder / "decoder.json"
    path.write_text(path.read_text().replace('"float32"', '"float16"'))


def swap_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


def test_damage_is_told(tmp_path: Path, snapshot: object) -> None:
    told = {}
    changes: dict[str, Callable[[Path], object]] = {
        "no folder": shutil.rmtree,
        "no card": lambda folder: (folder / "decoder.json").unlink(),
        "card is no JSON": lambda folder: (folder / "decoder.json").write_text("{"),
        "a newer card": lambda folder: (folder / "decoder.json").write_text('{"version": 9}'),
        "a changed card": change_card,
        "impossible sizes": with_card(decoder={**read_card(Path(exported_embedded())).decoder, "dim": 7}),
        "no weights": lambda folder: (folder / "decoder.weights").unlink(),
        "weights cut short": lambda folder: (folder / "decoder.weights").write_bytes(b"1234"),
        "a changed graph": lambda folder: swap_bytes(folder / "decoder.onnx"),
        "a foreign tokenizer": lambda folder: shutil.copy(GOLDEN / "LLaMA" / "tokenizer.model", folder),
        "a file outside": with_card(files={"../elsewhere": "0"}),
        "a form that is not run": with_card(format="onnx-atc"),
        "no encoder": with_card(files={}),
    }
    for name, change in changes.items():
        folder = tmp_path / name.replace(" ", "-")
        shutil.copytree(exported_embedded(), folder)
        told[name] = damaged(folder, change)

    assert told == snapshot


def test_parts_of_two_models_are_refused(snapshot: object) -> None:
    told = {}
    for name, options in {
        "another model's picture half": model_options("LORA-BIAS-TINY"),
        "another model's encoder": {"encoder": str(Path(exported_embedded()) / "encoder.onnx")},
        "a wider context": {**model_options(), "context": 4096},
        "another dtype": {**model_options(), "dtype": "float16"},
        "another channel order": {**model_options(), "channel_order": "bgr"},
        "another device": {**model_options(), "device": "cuda"},
    }.items():
        with pytest.raises((GraphError, UsageError)) as caught:
            Captioner.load(decoder=exported_golden("BIAS-TINY"), **options)
        shown = str(caught.value).replace(exported_golden("BIAS-TINY"), "FOLDER")
        shown = shown.replace(exported_embedded(), "EMBEDDED").replace(metadata.version("onnxruntime"), "VERSION")
        told[name] = shown

    assert told == snapshot


def test_numbers_of_the_export_are_not_chosen_again() -> None:
    with pytest.raises(ValueError, match="are those of its export"):
        Captioner.load(decoder=exported_embedded(), precision="int8")
