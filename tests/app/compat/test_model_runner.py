"""`ModelRunner`: its steps are methods on top of the engine, and subclasses override them."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from llama_adapter import Captioner, ModelRunner, RawPrompt, UsageError
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from llama_adapter.app.pictures.inputs import fetching
from llama_adapter.vision.errors import PictureError

STAR = str(sample_pictures() / "12-red-star.jpg")
SETTINGS: dict[str, Any] = {
    "model_name": "shapes",
    "model_path": str(embedded_model()),
    "exe_mode": "eager",
    "world_size": 1,
    "model_config": {"enable_profiler": False, "enable_online_split_weight": True, "tokenizer_mode": "chat"},
    "data_config": {"input_max_len": 256, "max_new_tokens": 16, "batch_size": 2},
    "parallel_config": {"attn_tp_size": 1, "moe_tp_size": 1, "lmhead_tp_size": 1},
}


@pytest.fixture(scope="module")
def loaded() -> Iterator[ModelRunner]:
    runner = ModelRunner(SETTINGS, device="cpu", allowed_hosts=("pictures.example",))
    runner.init_model()
    yield runner
    runner.close()


def test_settings_may_all_be_in_tables() -> None:
    config = {"model_name": "mine", "model_path": "x", "exe_mode": "eager"}
    settings = {"model_config": config, "scheduler_config": {"max_new_tokens": 5}, "parallel_config": {"world_size": 2}}
    for more in ({}, {"model_name": "", "model_path": ""}):
        runner = ModelRunner(settings | more, device="cpu")
        assert (runner.model_name, runner.model_path) == ("mine", "x")
        assert (runner.max_new_tokens, runner.execute_mode, runner.world_size) == (5, "eager", 2)


class AboutTheStar(ModelRunner):
    """Asks for the color of the named thing, and records the order of the steps."""

    def __init__(self, runner_settings: dict[str, Any], **settings: Any) -> None:
        self.steps: list[str] = []
        super().__init__(runner_settings, **settings)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        names = ("init_device", "cast_format", "init_tokenizer", "graph_compile", "define_profiler")
        if name in (*names, "model_input_prepare", "model_inference", "model_output_process"):
            super().__getattribute__("steps").append(name)
        return found

    def model_input_prepare(self, input_dict: dict[str, Any]) -> dict[str, Any]:
        if input_dict["is_prefill"]:
            prompts = [f"What color is the {name}?" for name in input_dict["prompts"]]
            input_dict = {**input_dict, "prompts": prompts}
        return super().model_input_prepare(input_dict)


@pytest.mark.proves("ModelRunner", "CPU")
def test_answers_are_those_of_the_captioner(loaded: ModelRunner) -> None:
    prompts = ["Generate caption of this image", "What color is the star?", "Is there a circle?"]
    texts = loaded.model_generate(prompts, [STAR] * 3)
    alone = loaded.model_generate(["What is a star?"])
    with Captioner.load(device="cpu") as captioner:
        assert texts == [answer.text for answer in captioner.generate([STAR] * 3, prompts, max_new_tokens=16)]
        assert alone == [captioner.generate_text("What is a star?", max_new_tokens=16)[0].text]
    assert [answer.index for answer in loaded.answers] == [0]
    assert len(loaded.inference_times) >= len(loaded.answers[0].token_ids)


def test_a_subclass_changes_the_input_and_sees_the_steps_in_their_order() -> None:
    runner = AboutTheStar(SETTINGS, device="cpu")
    runner.init_model()
    assert runner.steps == ["init_device", "cast_format", "init_tokenizer"]
    runner.steps.clear()
    runner.model_generate(["star"], STAR, warm_up=True)
    step = ["model_input_prepare", "model_inference", "model_output_process"]
    assert runner.steps == ["define_profiler", *step, *step]
    assert runner.model_generate(["star"], STAR) == ["red"]  # the warm-up left no state behind
    runner.model_output_process = lambda *_: None  # a subclass that keeps no answers comes to an end too
    assert runner.model_generate(["star"], STAR) == [""]
    assert runner.answers == []
    runner.close()


def test_a_long_prompt_is_cut_with_a_warning() -> None:
    data = {**SETTINGS["data_config"], "input_max_len": 20}
    runner = ModelRunner({**SETTINGS, "data_config": data, "model_config": {}}, device="cpu")
    runner.init_model()
    with pytest.warns(UserWarning, match="input_max_len is 20"):
        runner.model_generate([RawPrompt("word " * 100)])
    assert runner.answers[0].prompt_tokens == 20
    runner.close()


def test_the_profiler_writes_a_trace(tmp_path: Path) -> None:
    runner = ModelRunner({}, device="cpu")
    with runner.define_profiler(True, str(tmp_path / "prof"), active=1, repeat=2, skip_first=1) as profile:
        for _ in range(5):
            profile.step()
    assert [path.suffixes for path in (tmp_path / "prof").iterdir()] == [[".json", ".gz"]] * 2
    with pytest.raises(KeyError), runner.define_profiler(True, str(tmp_path / "failed")):
        raise KeyError
    assert len(list((tmp_path / "failed").iterdir())) == 1


@pytest.mark.parametrize(
    ("picture", "kind", "said"),
    [
        (str(sample_pictures()), ValueError, r"Wanted one picture as picture 1, got \d+ of '.*pictures"),
        (str(sample_pictures() / "1*.jpg"), ValueError, r"Wanted one picture as picture 1, got \d+ of '.*1\*\.jpg'"),
        (np.zeros((2, 8, 8, 3), np.uint8), ValueError, r"Wanted one picture as picture 1, got 2 of \(2, 8, 8, 3\)"),
        (b"no picture", PictureError, "picture 1"),
        ("https://elsewhere.example/star.jpg", PictureError, "Pictures of `elsewhere.example` are not fetched"),
    ],
    ids=["folder", "pattern", "batch", "bytes", "address"],
)
def test_a_prompt_has_one_picture(picture: Any, kind: type[Exception], said: str, loaded: ModelRunner) -> None:
    with pytest.raises(kind, match=said):
        loaded.model_generate(["What color is the star?"] * 2, [STAR, picture])


@pytest.mark.parametrize("kind", ["bytes", "file", "image", "pixels", "tensor", "batch", "paths", "iterator"])
def test_a_single_picture_may_have_any_form(kind: str, loaded: ModelRunner) -> None:
    image = Image.open(STAR).convert("RGB")
    pixels = np.array(image)
    content = Path(STAR).read_bytes()
    forms = {"bytes": content, "file": io.BytesIO(content), "image": image, "pixels": pixels, "batch": pixels[None]}
    forms |= {"tensor": torch.from_numpy(pixels), "paths": np.array([STAR]), "iterator": iter([STAR])}

    assert loaded.model_generate("What color is the star?", forms[kind]) == ["red"]


def test_a_picture_of_an_allowed_host_is_fetched(loaded: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = {"pictures.example": Path(STAR).read_bytes()}
    monkeypatch.setattr(fetching, "fetch_in_thread", lambda url, **_: pictures[url.host])

    assert loaded.model_generate(["What color is the star?"], ["https://pictures.example/star.jpg"]) == ["red"]


def test_bits_reach_the_model_and_what_cannot_be_served_is_refused() -> None:
    runner = ModelRunner({"model_config": {"mm_quant_mode": "W8A8"}}, device="cpu")
    assert (runner.settings["precision"], runner.settings["operators"]) == ("int8", "w8a8")
    with pytest.raises(UsageError, match="moe_tp_size"):
        ModelRunner({**SETTINGS, "parallel_config": {"moe_tp_size": 2}})
    with pytest.raises(UsageError):
        ModelRunner(SETTINGS, device="cpu").model_generate("before init_model")
