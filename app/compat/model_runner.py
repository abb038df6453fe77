"""`ModelRunner`: the steps of a generation as methods, as in CANN's recipes. The captioner's engine runs them.

A subclass overrides the steps that it changes. `runner_settings` is the dict of a ModelRunner YAML.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from llama_adapter.app.captioning.active_request import ActiveRequest
from llama_adapter.app.captioning.caption_loop import CaptionLoop
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.pictures import RemotePicture, given_pictures
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.compat import model_runner_settings
from llama_adapter.app.models.models_by_name import find_model, model_settings
from llama_adapter.app.models.spec import AUTO, PLAIN_MODES
from llama_adapter.app.reading.reader import PictureReading
from llama_adapter.app.tasks.answers import Answer, Event, TextDelta
from llama_adapter.app.tasks.prompts import Prompt, RawPrompt
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.errors import UsageError
from llama_adapter.vision.errors import PictureError

_WARM_UP_STEPS = 2
_TAKEN = ("mode", "dtype", "precision", "operators", "batch_size")  # the settings that are used


class ModelRunner:
    """Runs a model in steps. `model_generate` calls the other methods.

    `model_input_prepare` gets `input_dict`, which has `prompts`, `pictures` (or None), `is_prefill`, `generate_ids` and
    `texts`, and makes `input_ids` from the prompts. `model_inference` submits them to the engine and runs one engine
    step for all prompts. `model_output_process` assigns the results to the prompts. The engine keeps tokens, caches and
    positions.
    """

    def __init__(self, runner_settings: Mapping[str, Any], **settings: Any) -> None:
        """
        Parameters:
            runner_settings: `model_name`, `model_path`, `exe_mode`, `world_size`, `model_config`, `data_config`,
                `parallel_config`. Without `model_path`, the embedded model is used.
            settings: further settings of `Captioner.load`, such as `adapter`, `clip` and `device`.

        Raises UsageError for a value that is not supported, and DeviceError.
        """
        self.runner_settings = runner_settings
        imported = model_runner_settings.import_settings(runner_settings).check("runner_settings").flat()
        path = runner_settings.get("model_path")
        self.settings: dict[str, Any] = {
            **({} if path is None else model_settings(find_model(os.fspath(path)))),
            **{name: imported[name] for name in _TAKEN if name in imported},
            **settings,
        }
        self.model_name = runner_settings.get("model_name", "default_model_name")
        self.model_path = path
        self.execute_mode: str = self.settings.get("mode", AUTO)  # `init_model` resolves it
        self.input_max_len: int = imported.get("max_prompt_tokens", 1024)
        self.max_new_tokens: int = imported.get("max_new_tokens", 32)
        config = runner_settings.get("model_config") or {}
        self.enable_profiler: bool = config.get("enable_profiler", False)
        self.tokenizer_mode: str = config.get("tokenizer_mode", "default")
        self.device: torch.device | None = None
        self.model: Captioner | None = None
        self.tokenizer: Any = None
        self._loop: CaptionLoop | None = None  # set while `model_generate` runs
        self.answers: list[Answer] = []  # answers of the last `model_generate`
        self.inference_times: list[float] = []  # durations of its steps in seconds
        self.init_device()

    def init_device(self) -> None:
        """Open the device of `settings["device"]`, by default the best one."""
        backend = open_backend(str(self.settings.get("device", "auto")))
        self.device = backend.device
        self.settings["device"] = str(backend.device)

    def init_model(self) -> None:
        """Load the model and its tokenizer, and in a graph mode compile its steps."""
        self.cast_format()
        self.model = Captioner.load(**self.settings)
        self.init_tokenizer()
        self.execute_mode = self.model.info.mode
        if self.execute_mode not in PLAIN_MODES:
            self.graph_compile()

    def cast_format(self) -> None:
        """Choose the layout that weights get at load: the device's own with `operators` auto, a plain one with aten."""
        self.settings.setdefault("operators", "auto")

    def init_tokenizer(self) -> None:
        """Take the model's tokenizer."""
        self.tokenizer = self._loaded().tokenizer

    def graph_compile(self) -> None:
        """Compile the steps before the first prompt, in the mode of `exe_mode`."""
        self._loaded().warm_up(max_new_tokens=self.max_new_tokens)

    def define_profiler(
        self,
        enable_profiler: bool = False,
        profile_save_path: str = "prof",
        active: int = 10,
        repeat: int = 1,
        skip_first: int = 0,
    ) -> AbstractContextManager[Any]:
        """The device's profiler, a context manager with `step()`; a context manager with None if it is not enabled.

        Each of `repeat` traces in `profile_save_path` has `active` steps.
        """
        if not enable_profiler:
            return nullcontext()
        os.makedirs(profile_save_path, exist_ok=True)
        profiler = partial(open_backend(self.settings["device"]).profiler, Path(profile_save_path))
        return StepProfiler(profiler, active=active, repeat=repeat, skip_first=skip_first)

    def tokenize_prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The token ids of prompts: of the text as it is, or in the instruction template if `tokenizer_mode` is `chat`.

        A prompt longer than `input_max_len` is cut to its first token and its end, with a warning.
        """
        model, ids = self._loaded(), []
        for index, prompt in enumerate(prompts):
            given = RawPrompt(prompt) if isinstance(prompt, str) and self.tokenizer_mode != "chat" else prompt
            encoded = model.encode_prompt(given, max_tokens=self.input_max_len)
            if encoded.num_cut:
                warnings.warn(
                    f"prompt {index} lost {encoded.num_cut} tokens: input_max_len is {self.input_max_len}", stacklevel=2
                )
            ids.append(list(encoded.token_ids))
        return ids

    def model_input_prepare(self, input_dict: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a step: in the first step `input_ids` and `pixels` for each prompt, later nothing.

        `pixels` has an array (S, S, 3) for each prompt with a picture, otherwise None. Raises PictureError.
        """
        if not input_dict["is_prefill"]:
            return {}
        input_ids = self.tokenize_prompts(input_dict["prompts"])
        pictures = input_dict["pictures"]
        pixels = [None] * len(input_ids) if pictures is None else [self._pixels(picture) for picture in pictures]
        return {"input_ids": input_ids, "pixels": pixels}

    def _pixels(self, picture: Any) -> np.ndarray:
        (found,) = given_pictures(picture)
        source, reader = found.source, self._loaded().reader
        if isinstance(source, RemotePicture):
            source = source.read(reader, name="")
        reading = source if isinstance(source, PictureReading) else reader.read(source, name="")
        if reading.pixels is None:
            assert reading.error is not None
            raise PictureError(reading.error.code, reading.error.message)  # type: ignore[arg-type]
        return reading.pixels

    def model_inference(
        self, model_inputs: dict[str, Any], is_prefill: bool = False, warm_up: bool = False
    ) -> tuple[list[Event], float]:
        """Submit new prompts to the engine, and run one engine step; returns its events and its duration in seconds."""
        assert self._loop is not None, "model_inference is a step of model_generate"
        started = time.perf_counter()
        if is_prefill:
            self._loop.start(self._requests(model_inputs))
        events = self._loop.step()
        return events, time.perf_counter() - started

    def _requests(self, model_inputs: dict[str, Any]) -> list[tuple[Any, list[ActiveRequest]]]:
        model = self._loaded()
        sampling = SamplingParams(max_new_tokens=self.max_new_tokens)
        asked: list[tuple[Any, list[ActiveRequest]]] = []
        for index, (ids, pixels) in enumerate(zip(model_inputs["input_ids"], model_inputs["pixels"], strict=True)):
            prompt = model.encode_prompt(ids)
            request = ActiveRequest(index=index, picture=f"prompt {index}", digest="", prompt=prompt, sampling=sampling)
            asked.append((model.info.text_prefix() if pixels is None else pixels, [request]))
        return asked

    def model_output_process(
        self, model_inputs: dict[str, Any], outputs: list[Event], input_dict: dict[str, Any]
    ) -> None:
        """Add the results of a step to `generate_ids`, `texts` and `answers` in `input_dict`."""
        input_dict["is_prefill"] = False
        for event in outputs:
            if isinstance(event, TextDelta):
                input_dict["generate_ids"][event.index] += event.token_ids
                input_dict["texts"][event.index] += event.text
            else:
                input_dict["generate_ids"][event.index] = list(event.token_ids)
                input_dict["texts"][event.index] = event.text
                input_dict["answers"][event.index] = event

    def model_generate(self, prompts: str | Sequence[Prompt], pictures: Any = None, warm_up: bool = False) -> list[str]:
        """The texts of the answers, in the order of the prompts. The attribute `answers` has the complete answers.

        Parameters:
            prompts: one or several prompts.
            pictures: one for each prompt, in the forms that `Captioner.generate` takes; None for prompts without one.
            warm_up: run two steps only, without a profiler.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if pictures is not None and (isinstance(pictures, (str, os.PathLike)) or not isinstance(pictures, Iterable)):
            pictures = [pictures]
        if pictures is not None and len(pictures) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with {len(pictures)} pictures: give one each")
        input_dict: dict[str, Any] = {
            "prompts": prompts,
            "pictures": pictures,
            "is_prefill": True,
            "generate_ids": [[] for _ in prompts],
            "texts": [""] * len(prompts),
            "answers": [None] * len(prompts),
        }
        if pictures is not None:
            self._loaded().info.require_adapter()
        self.inference_times = []
        profiler = self.define_profiler(self.enable_profiler and not warm_up)
        try:
            with profiler as profile, self._loaded().open_loop(StageClock()) as self._loop:
                is_prefill = bool(prompts)
                while is_prefill or (
                    self._loop.in_flight and not (warm_up and len(self.inference_times) == _WARM_UP_STEPS)
                ):
                    input_dict["is_prefill"] = is_prefill
                    model_inputs = self.model_input_prepare(input_dict)
                    outputs, seconds = self.model_inference(model_inputs, is_prefill=is_prefill, warm_up=warm_up)
                    self.model_output_process(model_inputs, outputs, input_dict)
                    self.inference_times.append(seconds)
                    is_prefill = False
                    if profile is not None:
                        profile.step()
        finally:
            self._loop = None
        self.answers = [answer for answer in input_dict["answers"] if answer is not None]
        texts: list[str] = input_dict["texts"]
        return texts

    def close(self) -> None:
        """Release the model. Can be called again."""
        if self.model is not None:
            self.model.close()

    def _loaded(self) -> Captioner:
        if self.model is None:
            raise UsageError("The model is not loaded", hint="call init_model() first")
        return self.model


class StepProfiler:
    """Traces some steps of a loop: after `skip_first` steps, it writes `repeat` traces of `active` steps each.

    With `repeat` 0, it writes traces until the end.
    """

    def __init__(
        self, profiler: Callable[[], AbstractContextManager[Any]], *, active: int, repeat: int, skip_first: int
    ) -> None:
        self._profiler, self._active, self._repeat, self._skip_first = profiler, active, repeat, skip_first
        self._index = 0  # index of the present step
        self._running = ExitStack()

    def __enter__(self) -> Self:
        self._begin_step()
        return self

    def step(self) -> None:
        """End the present step and begin the next one."""
        self._index += 1
        self._begin_step()

    def __exit__(self, *raised: object) -> None:
        self._running.close()

    def _begin_step(self) -> None:
        number, offset = divmod(self._index - self._skip_first, self._active)
        if offset == 0 and number >= 0:
            self._running.close()
            if self._repeat == 0 or number < self._repeat:
                self._running.enter_context(self._profiler())
