"""`pipeline`: a callable for a task and a model that turns inputs into dicts, as in MindFormers and transformers."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.pictures import given_pictures, is_one_picture, read_image
from llama_adapter.app.captioning.tasks.answers import Answer, Event, TextDelta, answers_to_pandas
from llama_adapter.app.captioning.tasks.prompts import Prompt, RawPrompt
from llama_adapter.app.captioning.tasks.registry import get_task, tasks
from llama_adapter.app.captioning.tasks.task import FREE_TEXT, Task
from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion, is_one_prompt, text_items
from llama_adapter.app.compat.infer_config import graphs_of
from llama_adapter.app.compat.loading import open_model
from llama_adapter.app.compat.streamer import Streamer
from llama_adapter.app.models.spec import EXPORTED
from llama_adapter.app.pictures.reading.reader import PictureReader
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.given import whole_number
from llama_adapter.runtime.settings.setting import meant

TEXT = "text_generation"
_ALIASES = {
    "text-generation": TEXT,
    "image_to_text": "caption",
    "image-to-text": "caption",
    "visual_question_answering": "ask",
    "visual-question-answering": "ask",
}
_SAMPLING = frozenset(field.name for field in fields(SamplingParams)) | {"do_sample", "eos_token_id", "num_beams"}
_NO_EFFECT = {  # option of another system -> what this package does instead
    "is_sample_acceleration": "tokens are always chosen on the device",
    "pad_token_id": "answers have no padding",
    "use_past": "answers are always made from a cache",
    "dynamic": "any shape is taken",
    "ge_config_path": "there is no graph engine configuration; `mode` chooses the graphs of a device",
}
_PICTURE_COLUMNS = ("image", "picture", "img", "images", "path")
_TEXT_COLUMNS = ("text", "prompt", "src", "question", "instruction")


class Outputs(list[dict[str, Any]]):
    """The dicts of a batch. The attribute `answers` has the complete answers."""

    def __init__(self, outputs: Iterable[dict[str, Any]], answers: Iterable[Answer]) -> None:
        super().__init__(outputs)
        self.answers = list(answers)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a row for each answer. Raises ImportError without pandas."""
        return answers_to_pandas(self.answers)


def pipeline(
    task: str,
    model: Any = None,
    tokenizer: Any = None,
    image_processor: Callable[[Any], Any] | None = None,
    audio_processor: None = None,
    backend: str = "torch",
    **settings: Any,
) -> "Pipeline":
    """Make a callable for a task. It takes inputs and returns a dict for each.

    >>> from llama_adapter import pipeline
    >>> describe = pipeline("caption")
    >>> describe(["a.jpg", "b.jpg"], max_new_tokens=20)

    Parameters:
        task: `"caption"`, `"ask"`, `"choose"`, `"text_generation"`, or the name of an installed task.
        model: None for the embedded model; a name, which is a folder on the search path `LLAMA_ADAPTER_HOME`; a bundle;
            a LLaMA folder in Meta's or Hugging Face's format; the folder of an exported decoder; a folder with exactly
            one YAML, or a YAML file; a tuple (llama_dir, adapter) or (llama_dir, adapter, clip); a mapping of settings,
            or an `InferConfig`; or a `Captioner`, which the caller must close.
        tokenizer: None, or the model's tokenizer as an object of another library, such as a transformers
            `LlamaTokenizer`. The pipeline checks that it gives the same ids as the model's tokenizer.
        image_processor: called with each picture as a PIL image, before the model resizes it; returns a picture.
        audio_processor: None. No model here takes sounds.
        backend: `"torch"`; `"onnx"` or `"om"` with `encoder=FILE` for an exported picture encoder; `"ms"` or `"mslite"`
            for MindIR graphs run by MindSpore or MindSpore Lite. Then `model` is their folder or its name, the pair
            (prefill graph, increment graph), or an `InferConfig`. With `"ms"` and a checkpoint, torch runs it, and a
            warning says so.
        settings: those of `Captioner.load`, such as `device`, `dtype` and `batch_size`, and defaults for calls.

    Raises UsageError for arguments that are not supported, and what `Captioner.load` raises.
    """
    kind = get_task(_ALIASES.get(task, task)).name
    if audio_processor is not None:
        raise UsageError("audio_processor must be None: no model here takes sounds")
    captioner, defaults = open_model(model, settings, backend=backend)
    for name in ("prompt", "question"):
        if not get_task(kind).needs_picture and name in defaults and name not in settings:
            warnings.warn(f"{name} of the settings has no effect: the call gives the prompts", stacklevel=2)
            del defaults[name]
    try:
        made = Pipeline(kind, captioner, image_processor=image_processor, defaults=defaults)
        if tokenizer is not None:
            _check_tokenizer(tokenizer, captioner)
    except BaseException:
        if captioner is not model:
            captioner.close()
        raise
    return made


class InferTask:
    """MindSpore Lite's factory: makes pipelines from an `InferConfig`."""

    open_pipeline = staticmethod(pipeline)

    @classmethod
    def get_infer_task(cls, task_type: str, task_config: Mapping[str, Any], **settings: Any) -> "Pipeline":
        """The pipeline for a task. `settings` are those of `pipeline`, such as `tokenizer`.

        MindSpore Lite runs MindIR graphs, unless `backend` names another program. Raises what `pipeline` raises.
        """
        if "backend" not in settings:
            settings["backend"] = "torch" if graphs_of(task_config) is None else "mslite"
        return cls.open_pipeline(task_type, task_config, **settings)

    @classmethod
    def check_task_valid(cls, task_type: str) -> bool:
        """Whether `task_type` is a known task."""
        return task_type in cls.support_list()

    @classmethod
    def support_list(cls) -> list[str]:
        """The names of all tasks."""
        return [entry.name for entry in tasks()]


class Pipeline:
    """A task and a loaded model, made by `pipeline`. It is a context manager like `Captioner`."""

    def __init__(
        self,
        task: str,
        captioner: Captioner,
        *,
        image_processor: Callable[[Any], Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """`defaults` are options of `__call__` for every call. Raises TypeError for unknown options.

        Raises UsageError if the task is about pictures and the model is a LLaMA without adapter.
        """
        self.task, self.captioner, self.model = task, captioner, captioner
        self.tokenizer = captioner.tokenizer
        self._is_text = not get_task(task).needs_picture
        if not self._is_text:
            captioner.info.require_sight()
        self._reader: PictureReader | None = None  # None: the captioner's
        if image_processor is not None:
            if captioner.spec.vision_kind == "prefixes":
                raise UsageError("image_processor does not go with encoded pictures", hint="load a picture encoder")
            self._reader = PictureReader(
                captioner.spec.pictures,
                pixels=captioner.pixels,
                process=lambda image: given_pictures(image_processor(image))[0].source,
            )
        self._defaults = dict(defaults or {})
        self._options({})

    def __call__(self, inputs: Any, question: Any = None, **options: Any) -> Any:
        """Answer each input, in batches.

        For a list or a single input, the result is `Outputs`, a list of dicts. For a generator or a dataset (an object
        with a length and items), it is an iterator of the same dicts, which reads one batch at a time. Items may be
        dicts: `image_column` names the column of the picture, and `text_column` that of the prompt.

        The dict of `text_generation` is `{"text_generation_text": [prompt and answer]}`. That of other tasks is
        `{"caption_text": [answer], "picture": name}`, with `probabilities` for choices, and with `error` and `reason`
        if there is no answer.

        Parameters:
            inputs: pictures in every form that `Captioner.generate` takes; or prompts, which are texts to continue,
                pairs (instruction, input or None) for the model's template, or lists of token ids.
            question: for tasks about pictures: the question about all of them.
            streamer: called with the prompt's token ids and then with each new id, one answer after another. It also
                gets the ids of a stop text, which the answer does not contain.
            return_full_text: whether texts begin with their prompt. Default: True.
            add_special_tokens: whether a text gets the begin token. Default: True.
            max_length: most tokens of prompt and answer together; `max_new_tokens` takes precedence.
            do_sample: False takes the most probable token. True samples, by default with temperature 1 and top_p 1.
            eos_token_id: a token id or a list of ids that end an answer, beside the model's own end token.
            num_beams: 1. There is no beam search.
            num_return_sequences: answers to each input; the list in its dict has all of them. With a seed, answer i has
                seed + i.
            max_new_tokens, temperature, top_p, top_k, min_p, seed, repetition_penalty, presence_penalty,
                frequency_penalty, stop, stop_token_ids, max_prompt_tokens, json_schema, regex: as in
                `Captioner.generate`.

        Raises TypeError for an unknown option, UsageError for several beams, and what `Captioner.generate` raises.
        """
        if question is not None:
            options["question"] = question
        chosen = self._options(options)
        if hasattr(inputs, "iloc"):  # a pandas table or column
            inputs = inputs.to_dict("records") if hasattr(inputs, "columns") else list(inputs)
        if _is_lazy(inputs):
            return self._lazily(inputs, chosen)
        return self._answer(_as_list(inputs, is_text=self._is_text), chosen)

    def close(self) -> None:
        """Close the captioner."""
        self.captioner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pipeline({self.task!r}, {self.captioner!r})"

    def _options(self, of_call: Mapping[str, Any]) -> "_Options":
        """Sort the defaults and the options of a call by kind.

        Raises TypeError for an unknown name; the message has the most similar known name.
        """
        given = {**self._defaults, **of_call}
        of_pipeline, own = (
            _task_values(self.task, one, (one.get("prompt"), one.get("question"))) for one in (self._defaults, of_call)
        )
        aliases = set() if self._is_text else {"question", "prompt"}
        known = _SAMPLING | _value_names(self.task) | _CALL_OPTIONS | aliases
        for name in given:
            if name == "is_sample_acceleration" and self.captioner.info.mode == EXPORTED:
                continue  # determined by the export; answers are the same either way
            if name in _NO_EFFECT:
                warnings.warn(f"{name} has no effect: {_NO_EFFECT[name]}", stacklevel=3)
            elif name not in known:
                hint = meant(name, sorted(known), cutoff=0.6) or f"there are {', '.join(sorted(known))}"
                raise TypeError(f"{self.task} has no option `{name}`; {hint}")
        rest = {name: given[name] for name in _CALL_OPTIONS if name in given}
        return _Options(sampling=_sampling(given), values=of_pipeline | own, **rest)

    def _lazily(self, inputs: Any, options: "_Options") -> Iterator[dict[str, Any]]:
        items = iter(inputs) if hasattr(inputs, "__next__") else (inputs[index] for index in range(len(inputs)))
        for first in items:  # each is read before the next, which may change or close it
            others = itertools.islice(items, self.captioner.batch_size - 1)
            yield from self._answer(itertools.chain([first], others), options)

    def _answer(self, inputs: Iterable[Any], options: "_Options") -> Outputs:
        items = self._text_items(inputs, options) if self._is_text else self._picture_items(inputs, options)
        count = whole_number("num_return_sequences", options.num_return_sequences, least=1)
        items = [item.repeated(count) for item in items]
        questions = [question for item in items for question in item.questions]
        prompt_ids = [
            self.captioner.encode_prompt(question.prompt, question.task, sampling=options.sampling).token_ids
            for question in questions
        ]
        streamer = options.streamer
        if getattr(streamer, "tokenizer", self.tokenizer) is None:
            streamer.tokenizer = self.tokenizer  # type: ignore[union-attr]
        with closing(self.captioner.run(items, sampling=options.sampling, reader=self._reader)) as events:
            told = events if streamer is None else _relayed(events, streamer, prompt_ids)
            done = sorted((event for event in told if isinstance(event, Answer)), key=lambda answer: answer.index)
        by_input = itertools.groupby(done, lambda answer: answer.index // count)
        shown = [self._shown(list(several), prompt_ids[index * count], options) for index, several in by_input]
        return Outputs(shown, done)

    def _text_items(self, inputs: Iterable[Any], options: "_Options") -> list[WorkItem]:
        entry, prompts = get_task(self.task), list[Prompt]()
        task: Task = FREE_TEXT
        for one in inputs:
            given = _column(one, options.text_column, _TEXT_COLUMNS)
            if isinstance(given, str) and self.task == TEXT:
                given = RawPrompt(given) if options.add_special_tokens else self.tokenizer.encode(given, bos=False)
            elif isinstance(given, str):
                question = entry.question({**options.values, "instruction": given})
                given, task = question.prompt(self.captioner.info.default_prompt), question.task
            prompts.append(given)
        return text_items(iter(prompts), text_prefix=self.captioner.info.text_prefix(), task=task)

    def _picture_items(self, inputs: Iterable[Any], options: "_Options") -> list[WorkItem]:
        entry, reader = get_task(self.task), self._reader or self.captioner.reader
        may_change = isinstance(inputs, Iterator)  # the next step of an iterator may change or close an image
        items: list[WorkItem] = []
        for given in inputs:
            values = dict(options.values)
            if isinstance(given, Mapping):
                column = options.text_column
                if column is not None and column not in given:
                    raise _no_column(given, (column,))
                texts = (given.get("question"), given.get("prompt")) if column is None else (given[column],)
                columns = {name: value for name, value in given.items() if value is not None}
                values |= _task_values(self.task, columns, texts)
            if self.task in ("ask", "choose") and not values.get("instruction"):
                raise ValueError(f"{self.task} needs a question: the second argument, or a column `question`")
            question = entry.question(values)
            prompt = question.prompt(self.captioner.info.default_prompt)
            picture = _column(given, options.image_column, _PICTURE_COLUMNS)
            allowed = self.captioner.allowed_hosts
            for found in given_pictures(picture, allowed=allowed, reader=reader, first=len(items)):
                index = len(items)
                work = WorkQuestion(index=index, prompt=prompt, task=question.task)
                label = f"picture {index}" if found.name is None else found.name
                found = read_image(found, reader, label=label) if may_change else found
                items.append(WorkItem(picture=found.source, label=label, questions=(work,)))
        return items

    def _shown(self, answers: Sequence[Answer], prompt_ids: Sequence[int], options: "_Options") -> dict[str, Any]:
        """The dict of an input; its answers are to one prompt."""
        texts = [answer.text for answer in answers]
        if self._is_text and options.return_full_text:
            texts = [_full_text(self.tokenizer, prompt_ids, answer) for answer in answers]
        shown: dict[str, Any] = {f"{self.task}_text": texts}
        if not self._is_text:
            shown["picture"] = answers[0].picture
        if answers[0].choice is not None:
            shown["probabilities"] = answers[0].choice
        if (error := next((answer.error for answer in answers if answer.error), None)) is not None:
            shown |= {"error": error.code, "reason": error.message}
        return shown


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The options of a call, sorted by kind."""

    sampling: SamplingParams
    values: Mapping[str, Any]  # values of the task's own options
    streamer: Streamer | None = None
    image_column: str | None = None
    text_column: str | None = None
    return_full_text: bool = True
    add_special_tokens: bool = True
    num_return_sequences: int = 1


_CALL_OPTIONS = frozenset(field.name for field in fields(_Options)) - {"sampling", "values"}


def _relayed(events: Iterable[Event], streamer: Streamer, prompt_ids: Sequence[Sequence[int]]) -> Iterator[Event]:
    """The events. A streamer gets the tokens of answers, which are generated concurrently, one answer after another."""
    waiting = [[np.array(ids)] for ids in prompt_ids]  # of each answer, for the streamer
    num_known, ended, current = [0] * len(waiting), set[int](), 0
    for event in events:
        index = event.index
        new = event.token_ids if isinstance(event, TextDelta) else event.token_ids[num_known[index] :]
        num_known[index] += len(new)
        waiting[index] += [np.array([token_id]) for token_id in new]
        if isinstance(event, Answer):
            ended.add(index)
        while current < len(waiting):
            for ids in waiting[current]:
                streamer.put(ids)
            waiting[current].clear()
            if current not in ended:
                break
            streamer.end()
            current += 1
        yield event


def _task_values(task: str, given: Mapping[str, Any], texts: Iterable[Any]) -> dict[str, Any]:
    """The options of a task among `given`. The first of `texts` that is not None is its question."""
    values = {name: given[name] for name in _value_names(task) & given.keys()}
    question = next((text for text in texts if text is not None), None)
    return values if question is None else values | {"instruction": question}


def _value_names(task: str) -> set[str]:
    """The names of a task's options."""
    own = {option.name for option in get_task(task).options}
    return own | {"instruction", "input"} if task == "choose" else own


def _sampling(given: Mapping[str, Any]) -> SamplingParams:
    """Sampling options as sampling parameters of the engine; None means the default. Raises ValueError."""
    values = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    if (num_beams := values.pop("num_beams", 1)) != 1:
        raise UsageError(
            f"num_beams must be 1, got {num_beams!r}: there is no beam search",
            hint="do_sample=False takes the most probable token, as one beam does",
        )
    if "eos_token_id" in values:
        values["stop_token_ids"] = values.pop("eos_token_id")
    do_sample = values.pop("do_sample", None)
    if do_sample is False:
        values["temperature"] = 0.0
    elif do_sample:
        values = {"top_p": 1.0, **values, "temperature": values.get("temperature") or 1.0}
    if "max_new_tokens" in values:
        values.pop("max_length", None)
    elif "max_length" in values:
        values["max_new_tokens"] = values["max_length"]
    return SamplingParams(**values)


def _is_lazy(inputs: Any) -> bool:
    """Whether inputs are read one by one: from an iterator or a dataset."""
    if is_one_picture(inputs) or isinstance(inputs, (Sequence, Mapping)):
        return False
    return hasattr(inputs, "__next__") or (hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__"))


def _as_list(inputs: Any, *, is_text: bool) -> list[Any]:
    """Inputs as a list. A single input becomes a list of one; token ids, and a pair for the template, are one input."""
    if is_text:
        given = inputs if is_one_prompt(inputs) else list(inputs)  # an array of token ids is one prompt as a list
        return [given] if is_one_prompt(given) else given
    return list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]


def _column(given: Any, wanted: str | None, usual: Sequence[str]) -> Any:
    """The input itself, or if it is a dict, its column `wanted` or a `usual` one. Raises ValueError without it."""
    if not isinstance(given, Mapping):
        return given
    names = usual if wanted is None else (wanted,)
    for name in names:
        if given.get(name) is not None:
            return given[name]
    raise _no_column(given, names)


def _no_column(given: Mapping[Any, Any], names: Sequence[str]) -> ValueError:
    return ValueError(f"an input has no column {' or '.join(names)}; its columns are {', '.join(map(str, given))}")


def _full_text(tokenizer: Any, prompt_ids: Sequence[int], answer: Answer) -> str:
    """Prompt and answer as one text, with a space between them if decoding both together gives one."""
    prompt: str = tokenizer.decode(prompt_ids)
    rest: str = tokenizer.decode([*prompt_ids, *answer.token_ids])[len(prompt) :]
    is_parted = rest.startswith(" ") and not answer.text.startswith(" ")
    return prompt + (" " if is_parted else "") + answer.text


_PROBE = "Describe this image.\n\n### Response: Wie geht's? 3 + 4 = 7"


def _check_tokenizer(tokenizer: Any, captioner: Captioner) -> None:
    """Raise UsageError if a tokenizer gives other ids than the model's tokenizer."""
    encode = None if isinstance(tokenizer, str) else getattr(tokenizer, "encode", None)
    if encode is None:
        raise UsageError(
            f"tokenizer must be an object with `encode`, got {type(tokenizer).__name__}",
            hint="leave it out: the model brings its own",
        )
    theirs, ours = list(encode(_PROBE)), captioner.tokenizer.encode(_PROBE, bos=False)
    around = (captioner.tokenizer.bos_id, *captioner.tokenizer.end_ids)
    if [token_id for token_id in theirs if token_id not in around] != ours:
        raise UsageError(
            "The tokenizer given is not the model's: it encodes a text to other ids",
            hint="leave `tokenizer` out: the model brings its own",
        )
