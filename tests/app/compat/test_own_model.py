"""A model class of the program in `ModelRunner`'s loop, and the runner's methods that a subclass overrides."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from llama_adapter import ModelRunner, UsageError
from tests.app.golden import GOLDEN

SIZE, END = 16, 9


class Letters:
    """A tokenizer whose id is the place of a letter; 9 (i) is its end token."""

    eos_token_id = END

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("`") for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token_id + ord("`")) for token_id in ids)


class Counting(nn.Module):
    """Its next token is the last one and `step`. It has a cache: after the prefill it gets the newest token only."""

    def __init__(self, config: Any, runner_settings: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.tp_size = config, runner_settings.get("parallel_config", {}).get("lmhead_tp_size", 1)
        self.step = nn.Parameter(torch.tensor(1.0), requires_grad=False)
        self.register_buffer("weight_scale", torch.ones(1, dtype=torch.float64))
        self.seen: list[tuple[tuple[int, ...], Any, Any]] = []

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, generate_ids: Tensor, attention_mask: Tensor, is_prefill: bool, kv_len: Any
    ) -> dict[str, Any]:
        ids = input_ids if is_prefill else generate_ids[:, -1:]
        last = attention_mask.sum(dim=1) - 1 if is_prefill else torch.zeros(len(ids), dtype=torch.int64)
        self.seen.append((tuple(ids.shape), is_prefill, None if kv_len is None else kv_len.tolist()))
        return {"input_ids": ids, "last": last, "past_key_values": "cache"}

    def forward(self, input_ids: Tensor, last: Tensor, past_key_values: Any) -> Tensor:
        newest = input_ids[torch.arange(len(last)), last]
        return nn.functional.one_hot((newest + int(self.step)) % SIZE, SIZE).float()[:, None] * 50.0


class Whole(Counting):
    """Computes all positions at every step, without a cache, and returns an object with their logits."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, **given: Any) -> dict[str, Any]:  # type: ignore[override]
        self.seen.append((tuple(input_ids.shape), given["is_prefill"], given["past_key_values"]))
        return {"input_ids": input_ids}

    def forward(self, input_ids: Tensor) -> Any:  # type: ignore[override]
        return SimpleNamespace(logits=nn.functional.one_hot((input_ids + 1) % SIZE, SIZE).half())


class Loading(Counting):
    """Has weights."""

    def load_weights(self, weights: Any) -> None:
        self.load_state_dict(dict(weights), strict=False)

    @classmethod
    def from_pretrained(cls, path: str, runner_settings: dict[str, Any]) -> "Loading":
        made = cls("offline", runner_settings)
        made.step.fill_(3.0)
        return made


class Runner(ModelRunner):
    """Runs `Counting`."""

    def init_tokenizer(self) -> None:
        self.tokenizer = Letters()


def settings(*, path: Any = None, online: bool = True, **data: Any) -> dict[str, Any]:
    data = {"input_max_len": 6, "max_new_tokens": 4, **data}
    return {
        "model_name": "letters",
        **({} if path is None else {"model_path": str(path)}),
        "model_config": {"enable_online_split_weight": online},
        "data_config": data,
        "parallel_config": {"lmhead_tp_size": 1},
    }


def runner(model: Any = Counting, *, kind: Any = Runner, config: Any = None, **options: Any) -> Any:
    made = kind(settings(**options), device="cpu")
    made.init_model(model, config)
    return made


@pytest.mark.parametrize(
    ("model", "seen"),
    [
        (Counting, [((3, 6), True, None), *(((3, 1), False, [step, step + 5, step + 5]) for step in (1, 2, 3))]),
        (Whole, [((3, 6), True, None), *(((3, 6 + step), False, None) for step in (1, 2, 3))]),
    ],
)
def test_the_runner_drives_a_class_until_end_token_or_length(model: Any, seen: Any) -> None:
    made = runner(model)

    assert made.model_generate(["a", "abcdef", "abcdefgh"]) == ["bcde", "gh", "gh"]  # the last prompt lost two letters
    assert made.model.seen == seen
    assert made.model_generate("ag") == ["h"]
    assert made.model.seen[len(seen)][0] == (1, 6)  # the shorter prompt is padded to input_max_len
    assert len(made.model.seen) == len(seen) + 2
    assert len(made.inference_times) == 2


def test_samples_follow_data_config() -> None:
    class Flat(Counting):
        def forward(self, input_ids: Tensor, last: Tensor, past_key_values: Any) -> Tensor:
            logits = super().forward(input_ids, last, past_key_values) / 50.0
            logits[..., END] = -100.0
            return logits

    texts = {
        str(runner(Flat, do_sample=True, temperature=2.0, seed=seed, top_p=1.0).model_generate("a"))
        for seed in (1, 2, 3)
    }
    assert len(texts) > 1
    again = [runner(Flat, do_sample=True, temperature=2.0, seed=1, top_p=1.0).model_generate("a") for _ in range(2)]
    assert again[0] == again[1]
    assert runner(Flat, do_sample=False, temperature=2.0).model_generate("a") == ["bcde"]
    assert runner(Flat, do_sample=True, temperature=2.0, top_k=1).model_generate("a") == ["bcde"]


def test_weights_and_configuration(tmp_path: Path) -> None:
    save_file({"step": torch.tensor(2.0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [5], "hidden_size": 8}))

    made = runner(Loading, path=tmp_path)

    assert (made.model.config.hidden_size, made.model.tp_size) == (8, 1)
    assert made.model_generate("a") == ["c"]  # a, c, and then e, which the configuration makes the end
    assert runner(Loading, path=tmp_path, online=False).model_generate("a") == ["dgjm"]

    class Config:
        @classmethod
        def from_pretrained(cls, path: str) -> Any:
            return SimpleNamespace(path=path)

    assert runner(path=tmp_path, config=Config).model.config.path == str(tmp_path)


def test_the_tokenizer_of_the_models_folder() -> None:
    for path in (GOLDEN / "LLaMA", GOLDEN / "LLaMA-HF" / "TINY"):
        made = runner(kind=ModelRunner, path=path)
        assert made.tokenizer.encode("a")[0] == 1
    assert made.tokenize_prompts(["a"]).attention_mask.tolist()[0][:2] == [1, 1]


def test_weights_get_the_type_of_the_settings_and_quantised_ones_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "compressed_tensors"}}))

    class Quantised(Runner):
        quantization_methods = ("compressed-tensors",)

    with pytest.raises(UsageError, match="quantised by compressed-tensors"):
        runner(path=tmp_path)
    made = Quantised({**settings(path=tmp_path), "model_config": {"dtype": "bfloat16"}}, device="cpu")
    made.init_model(Counting)
    assert made.quantization == "compressed-tensors"
    assert (made.model.weight_scale.dtype, made.model.step.dtype) == (torch.bfloat16, torch.float32)

    class Unverified(Runner):
        def _parse_quant_hf_config(self) -> None:
            return None

    assert runner(path=tmp_path, kind=Unverified).model.weight_scale.dtype == torch.float64
    monkeypatch.chdir(tmp_path)
    made = Runner({"model_config": {"dtype": "bfloat16"}}, device="cpu")
    made.init_model(Counting)  # the folder in which the program runs is no model's
    assert (made.model.step.dtype, made.dtype, made.model.training) == (torch.bfloat16, torch.bfloat16, False)


def test_a_runner_as_in_the_recipes() -> None:
    """It overrides what the guide says must be overridden, and calls the loop with its own `input_dict`."""

    class Recipe(Runner):
        def init_model(self) -> None:  # type: ignore[override]
            super().init_model(Counting, SimpleNamespace(vocab_size=SIZE))

        def model_generate(self, prompts: Any, warm_up: bool = False) -> Any:  # type: ignore[override]
            inputs = self.tokenize_prompts(prompts)
            width = inputs.input_ids.size()[1]
            input_dict = {
                "input_ids": inputs.input_ids,
                "generate_ids": inputs.input_ids.clone(),
                "attention_mask": inputs.attention_mask,
                "kv_len": None,
                "is_prefill": True,
            }
            return super().model_generate(input_dict, width, warm_up)

        def model_input_prepare(self, input_dict: Any) -> Any:
            return self.model.prepare_inputs_for_generation(**input_dict)

        def model_output_process(self, model_inputs: Any, outputs: Any, input_dict: Any) -> None:
            input_dict["is_prefill"] = False
            next_tokens = torch.argmax(outputs, dim=-1)[:, -1:]
            input_dict["generate_ids"] = torch.cat([input_dict["generate_ids"], next_tokens], dim=-1)

    made = Recipe(settings(), device="cpu")
    made.init_model()
    assert made.model_generate(["ab"]) == ["cdef"]
    assert made.model_generate(["ab"], warm_up=True) == ["cd"]


@pytest.mark.parametrize(("kind", "model"), [(ModelRunner, None), (Runner, Counting)])
def test_a_subclass_decides_the_end_of_the_loop(kind: Any, model: Any) -> None:
    short = {"get_jump_prepare": lambda self, cnt, warm_up=False: cnt == 3}
    made = runner(model, kind=type("Short", (kind,), short))
    made.model_generate(["a"])
    assert len(made.inference_times) == 3
    made.close()


@pytest.mark.parametrize("online", [True, False])
def test_a_subclass_changes_loading(online: bool) -> None:
    class Changed(ModelRunner):
        def to_device(self) -> None:
            super().to_device()
            self.settings["batch_size"] = 3

        def _init_model_with_online_splited_weight(self, model: Any, config: Any) -> None:
            self.way = "online"
            super()._init_model_with_online_splited_weight(model, config)

        def _init_model_with_offline_splited_weight(self, model: Any, config: Any) -> None:
            self.way = "offline"
            super()._init_model_with_offline_splited_weight(model, config)

        def scale_dtype_adapter(self) -> None:
            self.settings["dtype"] = "float32"

    made = Changed({**settings(online=online), "exe_mode": "eager"}, device="cpu")
    assert (made.batch_size, made.dtype, made.max_position_embeddings, made.world_size) == (8, None, 131072, 1)
    made.init_model()
    assert (made.way, made.batch_size, made.dtype) == ("online" if online else "offline", 3, torch.float32)
    assert made.model.info.device.startswith("cpu")
    made.close()


def test_samples_of_llama_follow_data_config() -> None:
    made = runner(None, kind=ModelRunner, do_sample=True, temperature=3.0, top_p=1.0, seed=1)
    texts = [made.model_generate(["a star"])]
    for seed in (1, 2, 3):
        made.sampling = replace(made.sampling, seed=seed)
        texts.append(made.model_generate(["a star"]))
    made.close()
    assert texts[0] == texts[1]
    assert texts[1:].count(texts[1]) < 3


def test_what_an_own_class_cannot_have() -> None:
    with pytest.raises(UsageError, match="pictures"):
        runner().model_generate(["a"], ["a.jpg"])
    given = {**settings(), "world_size": 2, "parallel_config": {}}
    with pytest.raises(UsageError, match="one device"):
        Runner(given, device="cpu").init_model(Counting)
    with pytest.warns(UserWarning, match="override `graph_compile`"):
        Runner({**settings(), "exe_mode": "ge_graph"}, device="cpu").init_model(Counting)
