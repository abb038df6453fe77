"""Captioners on exported decoders give the same answers as torch, and refuse files that do not belong together.

Decoders in OM files run on stand-ins for ATC and ais_bench.
"""

import dataclasses
import operator
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
from tests.app.exported import exported_embedded, exported_golden, om_embedded, om_golden
from tests.app.golden import model_options
from tests.parity.exported import choice_limit
from tests.parity.golden import GOLDEN, GROUPS, batch
from tests.parity.test_captioner import answer
from tests.runtime.graphs import conftest

SAMPLES = sorted(sample_pictures().glob("*.[pj][np]g"))
PROMPTS = ["Generate caption of this image", "What colour is the background?", "How many shapes are there?"]
SAMPLE_PROMPTS = [PROMPTS[number % 3] for number in range(len(SAMPLES))]  # prompts of different lengths
# Tokens other than the most likely ones are drawn.
DRAWN: Any = {"temperature": 5.0, "top_p": 0.95, "top_k": 50, "seed": 4, "max_new_tokens": 20}
CHOICES = ["red", "a very light grey", "white"]


install = conftest.install  # a fixture


@pytest.fixture(params=["onnx", pytest.param("om", marks=pytest.mark.slow)])
def form(request: pytest.FixtureRequest, install: Callable[..., None]) -> str:
    """The form of an exported decoder."""
    if request.param == "om":
        install("")
    return str(request.param)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.proves("token ids of the reference", "Meta LLaMA and adapter", "BIAS adapters", "ONNX", "OM")
@pytest.mark.proves("LORA adapters", "CAPTION adapters (one query)", "ONNX", "OM")
def test_golden_cases_have_the_ids_of_the_reference(form: str, group: str, batch_size: int) -> None:
    case = batch(group, num_rows=batch_size)
    options = {**model_options(case["adapter"]), "exif": "ignore", "transparency": "ignore"}
    options["context"] = case["max_seq_len"]
    decoder = (om_golden if form == "om" else exported_golden)(case["adapter"])
    with Captioner.load(decoder=decoder, batch_size=batch_size, **options) as captioner:
        made = answer(captioner, case, as_ids=False)

    assert made == list(zip(case["output_ids"], case["output_text"], strict=True))


@pytest.fixture(scope="module")
def torchs() -> Captioner:
    return Captioner.load(dtype="float32", batch_size=5)


def answers(captioner: Captioner, *, number: int) -> tuple[list[Any], list[Any]]:
    """Greedy tokens and unfamiliarity for some sample pictures, sampled tokens for half of them, a stream; choices.

    Only probabilities of choices may differ a little.
    """
    pictures, prompts, half = SAMPLES[:number], SAMPLE_PROMPTS[:number], number // 2
    best = [(one.token_ids, one.unfamiliar) for one in captioner.generate(pictures, prompts)]
    drawn = [one.token_ids for one in captioner.generate(pictures[:half], prompts[:half], **DRAWN)]
    pieces = [event.text for event in captioner.stream(SAMPLES[0], PROMPTS[1]) if isinstance(event, TextDelta)]
    chosen = captioner.generate(pictures[:7], PROMPTS[1], choices=CHOICES)
    return [best, drawn, "".join(pieces)], [one.choice for one in chosen]


@pytest.fixture(scope="module")
def wanted(torchs: Captioner) -> tuple[list[Any], list[Any]]:
    return answers(torchs, number=len(SAMPLES))


@pytest.mark.slow
# Row by row is slow. Of 4 pictures, each row follows one of another length.
@pytest.mark.parametrize(("batch_size", "number"), [(1, 4), (5, len(SAMPLES))])
@pytest.mark.proves("embedded model", "streaming", "ONNX", "OM")
@pytest.mark.proves("continuous batching", "choices by scoring", "OM")
def test_sample_pictures_have_torchs_answers(
    form: str, wanted: tuple[list[Any], list[Any]], batch_size: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"decoder": exported_embedded()}
    if form == "om":
        monkeypatch.setenv("FAKE_DEVICES", "2")
        options = dict(zip(("decoder", "encoder"), om_embedded(), strict=True), device="npu:1")
    with Captioner.load(**options, batch_size=batch_size) as captioner:
        made, shares = answers(captioner, number=number)

    if form == "om":
        record = sys.modules["aclruntime"].RECORD
        assert record.loaded == record.freed > 0  # while the captioner itself is still there

    (best, drawn, streamed), other_shares = wanted
    assert ({captioner.info.device, captioner.info.vision} == {"ais_bench (device 1)"}) == (form == "om")
    assert made == [best[:number], drawn[: number // 2], streamed]
    for share, other in zip(shares, other_shares[:number], strict=True):
        assert share == pytest.approx(other, abs=choice_limit())


@pytest.mark.slow
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("form", ["om"], indirect=True)
@pytest.mark.parametrize("name", ["decoder.om", "prefix.om"])
def test_an_om_of_another_model_is_refused(name: str, tmp_path: Path) -> None:
    """The other model has the same sizes."""
    folder = shutil.copytree(om_golden("BIAS-TINY"), tmp_path / "mixed")
    for file in (name, f"{name}.json"):
        shutil.copy(Path(om_golden("training-checkpoint-0")) / file, folder)

    with pytest.raises(GraphError, match="compiled from another export"):
        Captioner.load(decoder=str(folder), **model_options("BIAS-TINY"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "int8"])
@pytest.mark.proves("float16", "int8 weights", "ONNX")
def test_fewer_bits_keep_the_answers_of_the_embedded_model(torchs: Captioner, precision: str) -> None:
    captioner = Captioner.load(decoder=exported_embedded(precision=precision), batch_size=16)

    wanted = [one.text for one in torchs.generate(SAMPLES)]
    made = [one.text for one in captioner.generate(SAMPLES)]

    assert sum(map(operator.eq, made, wanted)) >= 0.9 * len(SAMPLES)
    assert captioner.info.precision == ("float" if precision == "float16" else precision)


@pytest.mark.proves("text without a picture", "ONNX")
def test_texts_without_a_picture_are_answered(torchs: Captioner) -> None:
    captioner = Captioner.load(decoder=exported_embedded())

    for text_prefix in ("none", "zeros"):
        wanted = torchs.generate_text("Name a colour.", text_prefix=text_prefix)
        assert captioner.generate_text("Name a colour.", text_prefix=text_prefix)[0].token_ids == wanted[0].token_ids


@pytest.mark.slow
def test_a_server_runs_without_torch() -> None:
    assert run_without_torch(exported_embedded(), SAMPLES[0]) == "None\n[]\n"


# Warms a model up and asks it about a picture; prints the error, and the modules of torch that it has imported.
PROGRAM = """
import sys
from llama_adapter.app.serving.online.service import load_warm
from llama_adapter.app.serving.http_api.api import create_api, open_batches
from llama_adapter.app.serving.http_api.metrics import Metrics
from llama_adapter.app.serving.http_api.running import run
from llama_adapter.app.models.spec import CaptionerSpec
with load_warm(CaptionerSpec(decoder=sys.argv[1]), tell=print) as captioner:
    print(captioner.ask(sys.argv[2], "a", max_new_tokens=9).error)
print(sorted(name for name in sys.modules if name.partition(".")[0] == "torch"))
"""


def run_without_torch(decoder: Path | str, picture: Path) -> str:
    command = [sys.executable, "-c", PROGRAM, str(decoder), str(picture)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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
        "an incomplete tower": with_card(vision={"clip": {"image_size": 8}}),
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
        change(folder)
        with pytest.raises(LlamaAdapterError) as caught:
            Captioner.load(decoder=str(folder))
        told[name] = f"{caught.value.message} [{caught.value.hint}]".replace(str(folder), "FOLDER")

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
        shown = f"{caught.value} [{caught.value.hint}]".replace(exported_golden("BIAS-TINY"), "FOLDER")
        shown = shown.replace(exported_embedded(), "EMBEDDED").replace(metadata.version("onnxruntime"), "VERSION")
        told[name] = shown

    assert told == snapshot


def test_a_captioner_that_another_thread_closes_says_so_and_closes_its_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    captioner = Captioner.load(decoder=exported_embedded())
    runner = captioner._engine._runner
    run = runner.run

    def close_and_run(plan: object) -> object:
        monkeypatch.setattr(captioner._vision, "close", lambda: pytest.fail("the encoder cannot be closed"))
        with pytest.raises(pytest.fail.Exception, match="the encoder"):
            captioner.close()
        return run(plan)

    monkeypatch.setattr(runner, "run", close_and_run)
    with pytest.raises(RuntimeError, match="This Captioner is closed"):
        captioner.generate_text("What is it?", max_new_tokens=3)
    assert runner.program._step is None
