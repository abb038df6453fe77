"""`ModelRunner`: the steps of a generation as methods, as in CANN's recipes.

The captioner's engine runs LLaMA, and the loop itself a model class of the program.

A subclass overrides the steps that it changes. `runner_settings` is the dict of a ModelRunner YAML.
"""

import dataclasses
import os
import random
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from llama_adapter.app.captioning.active_request import ActiveRequest
from llama_adapter.app.captioning.caption_loop import CaptionLoop
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.pictures import is_one_picture
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.captioning.tasks.answers import Answer, TextDelta
from llama_adapter.app.captioning.tasks.prompts import Prompt, RawPrompt
from llama_adapter.app.captioning.work_items import read_pixels
from llama_adapter.app.compat import own_model
from llama_adapter.app.compat.importers import import_model_runner
from llama_adapter.app.models.models_by_name import find_model, model_settings
from llama_adapter.app.models.spec import AUTO, DEFAULT_BATCH_SIZE, PLAIN_MODES
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.devices.base import DTYPES
from llama_adapter.runtime.errors import UsageError

_WARM_UP_STEPS = 2
_TAKEN = ("mode", "dtype", "precision", "operators", "batch_size")  # the settings that are used
_SAMPLING = ("temperature", "top_k", "top_p", "seed")


class ModelRunner:
    """Runs a model in steps. `model_generate` calls the other methods.

    `model_input_prepare` gets `input_dict`, which has `prompts`, `pictures` (or None), `is_prefill`, `generate_ids` and
    `texts`, and makes `input_ids` from the prompts. `model_inference` submits them to the engine and runs one engine
    step for all prompts. `model_output_process` assigns the results to the prompts. The engine keeps tokens, caches and
    positions.

    With an own model class, `input_dict` has what its `prepare_inputs_for_generation` gets: all token ids so far as
    `input_ids` and `generate_ids`, `attention_mask`, `past_key_values`, `kv_len`, `is_prefill`, `curr_position`, and
    `position_ids` and `cache_position`, which are None. `model_inference` calls the model.
    """

    quantization_methods: ClassVar[Sequence[str]] = ()  # of weights that an own model class computes with

    def __init__(self, runner_settings: Mapping[str, Any], **settings: Any) -> None:
        """
        Parameters:
            runner_settings: `model_name`, `model_path`, `exe_mode`, `world_size`, `model_config`, `data_config`,
                `parallel_config`. Without `model_path`, the embedded model is used.
            settings: further settings of `Captioner.load`, such as `adapter`, `clip` and `device`.

        Raises UsageError for a value that is not supported, and DeviceError.
        """
        self.runner_settings = runner_settings
        imported = import_model_runner(runner_settings).check("runner_settings", is_file=False).flat()
        data, config = (runner_settings.get(name) or {} for name in ("data_config", "model_config"))
        self.settings: dict[str, Any] = {**{name: imported[name] for name in _TAKEN if name in imported}, **settings}
        name, self.model_path = (runner_settings.get(key) or config.get(key) for key in ("model_name", "model_path"))
        self.model_name = name or "default_model_name"
        self.execute_mode: str = self.settings.get("mode", AUTO)  # `init_model` resolves it
        self.input_max_len: int = imported.get("max_prompt_tokens", 1024)
        self.max_new_tokens: int = imported.get("max_new_tokens", 32)
        self.batch_size: int = self.settings.get("batch_size", DEFAULT_BATCH_SIZE)
        self.world_size: int = imported.get("tensor_parallel", 1)
        self.dtype: torch.dtype | None = DTYPES.get(self.settings.get("dtype", AUTO))  # None: chosen by `init_model`
        self.max_position_embeddings: int = data.get("max_position_embeddings", 131072)
        self.sampling = SamplingParams(**{name: imported[name] for name in _SAMPLING if name in imported})
        self.enable_online_split_weight: bool = config.get("enable_online_split_weight", False)
        self.hf_config: Any = None
        self.quantization: str | None = None
        self.enable_profiler: bool = config.get("enable_profiler", False)
        self.tokenizer_mode: str = config.get("tokenizer_mode", "default")
        self.device: torch.device | None = None
        self.model: Any = None  # a `Captioner`, or an own model
        self.tokenizer: Any = None
        self._loop: CaptionLoop | None = None  # set while `model_generate` runs LLaMA
        self._ended, self._is_complete = set[int](), False  # prompts of an own model with their end token; all of them
        self._random = random.Random()
        self.answers: list[Answer] = []  # answers of the last `model_generate`
        self.inference_times: list[float] = []  # durations of its steps in seconds
        self.init_device()

    def init_device(self) -> None:
        """Open the device of `settings["device"]`, by default the best one."""
        self.device = open_backend(str(self.settings.get("device", "auto"))).device

    def init_model(self, model: Any = None, config: Any = None) -> None:
        """Load the model and its tokenizer, and in a graph mode compile its steps.

        Parameters:
            model: a model class of the program, made as `model(config, runner_settings)`. None: LLaMA at `model_path`.
            config: the model's configuration, or a class with `from_pretrained`. None: `config.json` as attributes.

        Raises UsageError for an own class and weights that another program quantised, and what `Captioner.load` raises.
        """
        online, offline = self._init_model_with_online_splited_weight, self._init_model_with_offline_splited_weight
        (online if self.enable_online_split_weight else offline)(model, config)
        self.init_tokenizer()
        if self.execute_mode not in (AUTO, *PLAIN_MODES):
            self.graph_compile()

    def _init_model_with_online_splited_weight(self, model: Any, config: Any) -> None:
        """Load a whole checkpoint: LLaMA's ranks take their parts of it, an own class has `load_weights` for it."""
        self._load(model, config, online=True)

    def _init_model_with_offline_splited_weight(self, model: Any, config: Any) -> None:
        """Load a checkpoint as it is: LLaMA from its folder or bundle, an own class by `from_pretrained`."""
        self._load(model, config, online=False)

    def _load(self, model: Any, config: Any, *, online: bool) -> None:
        folder = Path(self.model_path or os.devnull)  # without a path, a place that has no files
        self.hf_config = own_model.read_config(config, folder)
        if model is not None:
            self._verify_quantization()
            if self.world_size != 1:
                raise UsageError(f"An own model class runs on one device, and world_size is {self.world_size}")
            self.model = own_model.build(model, self.hf_config, folder, self.runner_settings, online=online).eval()
        for step in (self.to_device, self.scale_dtype_adapter, self.cast_format):
            step()
        if model is None:
            path = {} if self.model_path is None else model_settings(find_model(os.fspath(self.model_path)))
            self.model = Captioner.load(**{**path, **self.settings})
            self.execute_mode, self.batch_size = self.model.info.mode, self.model.batch_size
            self.dtype = DTYPES[self.model.info.dtype]

    def _parse_quant_hf_config(self) -> Any:
        """What `hf_config` says about weights that another program quantised; None for float weights."""
        found = getattr(self.hf_config, "quantization_config", None)
        return found or getattr(self.hf_config, "compression_config", None)

    def _verify_quantization(self) -> None:
        """Set `quantization`. Raises UsageError for a method that is not in `quantization_methods`."""
        found = self._parse_quant_hf_config()
        self.quantization = str(found.get("quant_method")).lower().replace("_", "-") if found else None
        if found and self.quantization not in self.quantization_methods:
            message = f"The weights are quantised by {self.quantization}, which this runner does not support"
            hint = "name the float model; a runner of an own model class lists its `quantization_methods`"
            raise UsageError(message, hint=hint)

    def to_device(self) -> None:
        """Move an own model to `device`, and float weights to `dtype` if it is set. LLaMA is loaded there."""
        self.settings["device"] = str(self.device)
        if self._is_own:
            self.model.to(device=self.device, dtype=self.dtype if self.quantization is None else None)

    def scale_dtype_adapter(self) -> None:
        """Cast the scales of an own quantised model to `dtype`. LLaMA's scales have their type from the loader."""
        if self._is_own and self.quantization is not None and self.dtype is not None:
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                if name.endswith("scale"):
                    tensor.data = tensor.data.to(self.dtype)

    def cast_format(self) -> None:
        """Choose the layout that weights get at load: the device's own with `operators` auto, a plain one with aten."""
        self.settings.setdefault("operators", "auto")

    def init_tokenizer(self) -> None:
        """Take the model's tokenizer: for an own model `tokenizer.model` in its folder, else that of transformers."""
        if not self._is_own:
            self.tokenizer = self._loaded().tokenizer
        elif (file := Path(self.model_path or os.devnull) / "tokenizer.model").is_file():
            self.tokenizer = Tokenizer.load(file)
        else:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self.model_path)

    def graph_compile(self) -> None:
        """Compile the steps before the first prompt, in the mode of `exe_mode`. An own model gets a warning only."""
        if self._is_own:
            warnings.warn("An own model runs eager: override `graph_compile` to compile it", stacklevel=3)
        else:
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
        profiler = partial(open_backend(str(self.device)).profiler, Path(profile_save_path))
        return StepProfiler(profiler, active=active, repeat=repeat, skip_first=skip_first)

    def tokenize_prompts(self, prompts: Sequence[Any]) -> Any:
        """The token ids of prompts: of the text as it is, or in the instruction template if `tokenizer_mode` is `chat`.

        A prompt longer than `input_max_len` is cut to its first token and its end, with a warning. For an own model,
        longer ones lose their end; the result has the tensors `input_ids` and `attention_mask` (B, `input_max_len`).
        """
        if self._is_own:
            width, ids = self.input_max_len, [list(self.tokenizer.encode(prompt)) for prompt in prompts]
            return own_model.padded(ids, width=width, pad_id=(*self._end_ids, 0)[0], device=self.device)
        model = self._loaded()
        ids = []
        limit = SamplingParams(max_prompt_tokens=self.input_max_len)
        for index, prompt in enumerate(prompts):
            given = RawPrompt(prompt) if isinstance(prompt, str) and self.tokenizer_mode != "chat" else prompt
            encoded = model.encode_prompt(given, sampling=limit)
            if encoded.num_cut:
                warnings.warn(
                    f"prompt {index} lost {encoded.num_cut} tokens: input_max_len is {self.input_max_len}", stacklevel=2
                )
            ids.append(list(encoded.token_ids))
        return ids

    def model_input_prepare(self, input_dict: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a step: in the first step `input_ids` and `pixels` for each prompt, later nothing.

        `pixels` has an array (S, S, 3) for each prompt with a picture, otherwise None. Raises PictureError. For an own
        model, the result of its `prepare_inputs_for_generation`.
        """
        if self._is_own:
            return own_model.prepare(self.model, input_dict)
        if not input_dict["is_prefill"]:
            return {}
        input_ids = self.tokenize_prompts(input_dict["prompts"])
        model, pictures = self._loaded(), input_dict["pictures"]
        read = partial(read_pixels, reader=model.reader, allowed=model.allowed_hosts)
        if pictures is None:
            return {"input_ids": input_ids, "pixels": [None] * len(input_ids)}
        pixels = [read(picture, name=f"picture {index}") for index, picture in enumerate(pictures)]
        return {"input_ids": input_ids, "pixels": pixels}

    def model_inference(
        self, model_inputs: dict[str, Any], is_prefill: bool = False, warm_up: bool = False
    ) -> tuple[Any, float]:
        """Submit new prompts to the engine, and run one engine step; returns its events and its duration in seconds.

        For an own model, call it; returns its output.
        """
        started = time.perf_counter()
        if self._is_own:
            with torch.no_grad():
                outputs = self.model(**model_inputs)
            open_backend(str(self.device)).synchronise()
            return outputs, time.perf_counter() - started
        assert self._loop is not None, "model_inference is a step of model_generate"
        if is_prefill:
            self._loop.start(self._requests(model_inputs))
        events = self._loop.step()
        return events, time.perf_counter() - started

    def _requests(self, model_inputs: dict[str, Any]) -> list[tuple[Any, list[ActiveRequest]]]:
        model = self._loaded()
        sampling = dataclasses.replace(self.sampling, max_new_tokens=self.max_new_tokens)
        asked: list[tuple[Any, list[ActiveRequest]]] = []
        for index, (ids, pixels) in enumerate(zip(model_inputs["input_ids"], model_inputs["pixels"], strict=True)):
            prompt = model.encode_prompt(ids)
            request = ActiveRequest(index=index, picture=f"prompt {index}", digest="", prompt=prompt, sampling=sampling)
            asked.append((model.info.text_prefix() if pixels is None else pixels, [request]))
        return asked

    def model_output_process(self, model_inputs: dict[str, Any], outputs: Any, input_dict: dict[str, Any]) -> None:
        """Add the results of a step to `generate_ids`, `texts` and `answers` in `input_dict`.

        For an own model, choose the next tokens from its logits: the most probable ones, or as `data_config` samples.
        """
        input_dict["is_prefill"] = False
        if self._is_own:
            new = own_model.advance(input_dict, model_inputs, outputs, self.sampling, self._random)
            self._ended |= {row for row, token_id in enumerate(new) if token_id in self._end_ids}
            self._is_complete = len(self._ended) == len(new)
            return
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

        For an own model, a subclass may pass `input_dict` and the number of tokens of its prompts in place of both.
        """
        if self._is_own:
            return self._generate_own(prompts, pictures, warm_up)
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if pictures is not None:
            self._loaded().info.require_sight()
            is_one = is_one_picture(pictures) and getattr(pictures, "ndim", 3) == 3  # arrays may have several
            pictures = [pictures] if is_one or not isinstance(pictures, Iterable) else list(pictures)
            if len(pictures) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts came with {len(pictures)} pictures: give one each")
        input_dict: dict[str, Any] = {
            "prompts": prompts,
            "pictures": pictures,
            "is_prefill": True,
            "generate_ids": [[] for _ in prompts],
            "texts": [""] * len(prompts),
            "answers": [None] * len(prompts),
        }
        try:
            with self._loaded().open_loop(StageClock()) as self._loop:
                self._run_steps(input_dict, warm_up)
        finally:
            self._loop = None
        self.answers = [answer for answer in input_dict["answers"] if answer is not None]
        texts: list[str] = input_dict["texts"]
        return texts

    def _generate_own(self, prompts: Any, width: int | None, warm_up: bool) -> list[str]:
        input_dict = prompts
        if not isinstance(prompts, dict):
            if width is not None:
                raise UsageError("An own model class gets no pictures here", hint="override `model_generate`")
            inputs = self.tokenize_prompts([prompts] if isinstance(prompts, str) else prompts)
            width = inputs.input_ids.shape[1]
            unset = dict.fromkeys(("past_key_values", "position_ids", "kv_len", "cache_position"))
            input_dict = {**vars(inputs), **unset, "generate_ids": inputs.input_ids, "curr_position": width - 1}
        self._ended, self._is_complete, self._random = set(), False, random.Random(self.sampling.seed)
        self._run_steps(input_dict, warm_up)
        rows = input_dict["generate_ids"][:, width:].tolist()
        ends = [next((at for at, token_id in enumerate(ids) if token_id in self._end_ids), None) for ids in rows]
        return [self.tokenizer.decode(ids[:end]) for ids, end in zip(rows, ends, strict=True)]

    def _run_steps(self, input_dict: dict[str, Any], warm_up: bool) -> None:
        self.inference_times = []
        with self.define_profiler(self.enable_profiler and not warm_up) as profile:
            while not self.get_jump_prepare(num_steps := len(self.inference_times), warm_up):
                input_dict["is_prefill"] = is_prefill = num_steps == 0
                model_inputs = self.model_input_prepare(input_dict)
                outputs, seconds = self.model_inference(model_inputs, is_prefill=is_prefill, warm_up=warm_up)
                self.model_output_process(model_inputs, outputs, input_dict)
                self.inference_times.append(seconds)
                if profile is not None:
                    profile.step()

    def get_jump_prepare(self, cnt: int, warm_up: bool = False) -> bool:
        """Whether the loop ends before step `cnt`: no answer is incomplete, or two steps of a warm-up are done."""
        is_complete = self._is_complete or cnt >= self.max_new_tokens
        if self._loop is not None:
            is_complete = cnt > 0 and not self._loop.in_flight
        return is_complete or (warm_up and cnt >= _WARM_UP_STEPS)

    def close(self) -> None:
        """Release the model. Can be called again."""
        if isinstance(self.model, Captioner):
            self.model.close()

    @property
    def _is_own(self) -> bool:
        return isinstance(self.model, nn.Module)

    @property
    def _end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer of an own model: of its configuration, else of its tokenizer."""
        known = (getattr(self.tokenizer, name, None) for name in ("eos_token_id", "end_ids", "eos_id"))
        own = next((one for one in known if one is not None), ())
        found = getattr(self.hf_config, "eos_token_id", None) or own
        return (found,) if isinstance(found, int) else tuple(found or ())

    def _loaded(self) -> Captioner:
        if not isinstance(self.model, Captioner):
            raise UsageError("The model is not loaded", hint="call init_model() first")
        return self.model


class StepProfiler:
    """Traces some steps of a loop: after `skip_first` steps, it writes `repeat` traces of `active` steps each.

    With `repeat` 0, it writes traces until the end.
    """

    def __init__(
        self, profiler: Callable[[], AbstractContextManager[Any]], *, active: int, repeat: int, skip_first: int
    ) -> None:
        self._profiler, self._active, self._repeat = profiler, active, repeat
        self._index = -skip_first  # of the present step, counted from the first one that is traced
        self._running = ExitStack()

    def __enter__(self) -> Self:
        self._begin_step()
        return self

    def step(self) -> None:
        """End the present step and begin the next one."""
        self._index += 1
        self._begin_step()

    def __exit__(self, *raised: object) -> None:
        self._running.close()  # without the exception, with which a profiler writes no trace

    def _begin_step(self) -> None:
        number, offset = divmod(self._index, self._active)
        if offset == 0 and number >= 0:
            self._running.close()
            if self._repeat == 0 or number < self._repeat:
                self._running.enter_context(self._profiler())
