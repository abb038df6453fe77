"""`ModelRunner`: its steps are methods on top of the engine, and subclasses override them."""

from pathlib import Path
from typing import Any

import pytest

from llama_adapter import Captioner, ModelRunner, RawPrompt, UsageError
from llama_adapter.app.models.resources import embedded_model, sample_pictures

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
def test_answers_are_those_of_the_captioner() -> None:
    runner = ModelRunner(SETTINGS, device="cpu")
    runner.init_model()
    prompts = ["Generate caption of this image", "What color is the star?", "Is there a circle?"]
    texts = runner.model_generate(prompts, [STAR] * 3)
    alone = runner.model_generate(["What is a star?"])
    with Captioner.load(device="cpu") as captioner:
        assert texts == [answer.text for answer in captioner.generate([STAR] * 3, prompts, max_new_tokens=16)]
        assert alone == [captioner.generate_text("What is a star?", max_new_tokens=16)[0].text]
    assert [answer.index for answer in runner.answers] == [0]
    assert len(runner.inference_times) >= len(runner.answers[0].token_ids)
    runner.close()


def test_a_subclass_that_keeps_no_answers_comes_to_an_end() -> None:
    class Forgetful(ModelRunner):
        def model_output_process(self, *_: object) -> None:
            return

    runner = Forgetful(SETTINGS, device="cpu")
    runner.init_model()
    assert runner.model_generate(["What color is the star?"], STAR) == [""]
    assert runner.answers == []
    runner.close()


def test_a_subclass_changes_the_input_and_sees_the_steps_in_their_order() -> None:
    runner = AboutTheStar(SETTINGS, device="cpu")
    runner.init_model()
    assert runner.steps == ["init_device", "cast_format", "init_tokenizer"]
    runner.steps.clear()
    runner.model_generate(["star"], STAR, warm_up=True)
    step = ["model_input_prepare", "model_inference", "model_output_process"]
    assert runner.steps == ["define_profiler", *step, *step]
    assert runner.model_generate(["star"], STAR) == ["red"]  # the warm-up left no state behind
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


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(UsageError, match="moe_tp_size"):
        ModelRunner({**SETTINGS, "parallel_config": {"moe_tp_size": 2}})
    with pytest.raises(UsageError):
        ModelRunner(SETTINGS, device="cpu").model_generate("before init_model")


def test_bits_of_weights_and_inputs_reach_the_model() -> None:
    runner = ModelRunner({"model_config": {"mm_quant_mode": "W8A8"}}, device="cpu")

    assert (runner.settings["precision"], runner.settings["operators"]) == ("int8", "w8a8")
    with pytest.raises(UsageError, match="quant_config"):
        ModelRunner({"model_config": {"quant_config": "w3a16"}}, device="cpu")
