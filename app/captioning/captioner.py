"""The captioner, which answers prompts about pictures."""

import gc
import os
import threading
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypedDict, Unpack

from llama_adapter.app.captioning.active_request import ActiveRequest
from llama_adapter.app.captioning.caption_loop import CaptionLoop, Content
from llama_adapter.app.captioning.encoded_pictures import TextPrefixes
from llama_adapter.app.captioning.parts import Parts
from llama_adapter.app.captioning.pictures import GivenPicture, Pictures, given_pictures
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.captioning.tasks.answers import Answer, Event, TextDelta
from llama_adapter.app.captioning.tasks.choose import choosing
from llama_adapter.app.captioning.tasks.prompts import (
    Dialogue,
    EncodedPrompt,
    Prompt,
    PromptEncoder,
    Prompts,
    RawPrompt,
    shown_prompt,
)
from llama_adapter.app.captioning.tasks.task import FREE_TEXT, Task
from llama_adapter.app.captioning.trace import Trace
from llama_adapter.app.captioning.work_items import (
    Looked,
    Wants,
    WorkItem,
    WorkQuestion,
    read_ahead,
    text_items,
    work_items,
)
from llama_adapter.app.models.early import require_model
from llama_adapter.app.models.known import KnownModel, marks_of
from llama_adapter.app.models.oom_retry import OomRetry, attempt
from llama_adapter.app.models.parallel.errors import RankError
from llama_adapter.app.models.spec import PLAIN_MODES, BatchSize, CaptionerSpec, ModelInfo, VisionKind
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.inputs.urls import AllowedHost
from llama_adapter.app.pictures.reading.prefetch import Prefetcher
from llama_adapter.app.pictures.reading.reader import PictureReader, PictureReading, Reader
from llama_adapter.llm.conversation import Template
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.grammars import Grammars
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import PromptError, PromptTooLongError
from llama_adapter.llm.picture_format import Grid
from llama_adapter.llm.prefix import TextPrefix
from llama_adapter.llm.runners.base import WarmUp
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.given import texts, whole_number
from llama_adapter.runtime.graphs.defaults import MindirBackend
from llama_adapter.runtime.schemes import OperatorChoice, Precision
from llama_adapter.runtime.settings.setting import nearest
from llama_adapter.runtime.torch_import import note_torch_import
from llama_adapter.vision.config import ChannelOrder
from llama_adapter.vision.formats import Damaged, Orientation, Reading, Transparency, WantedOrder
from llama_adapter.vision.pixels import PixelRule, zero_picture
from llama_adapter.vision.squares import grid_of

if TYPE_CHECKING:  # exported models run without torch
    import torch

# Everything that users of a captioner need can be imported from this module.
__all__ = [
    "Answer",
    "AnswerError",
    "Captioner",
    "Dialogue",
    "Event",
    "ModelInfo",
    "Prompt",
    "RawPrompt",
    "TextDelta",
    "WorkItem",
    "WorkQuestion",
    "text_items",
    "work_items",
]

StrPath = str | os.PathLike[str]
DEFAULTS = CaptionerSpec()


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`, all optional."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    max_length: int | None
    max_prompt_tokens: int | None
    json_schema: str | Mapping[str, Any] | None
    regex: str | None


class RunOptions(SamplingOptions, total=False):
    """The keyword arguments of every answering method, all optional."""

    n: int
    logprobs: int | None
    clock: StageClock | None
    progress: bool


class AskOptions(RunOptions, total=False):
    """The keyword arguments of `Captioner.generate`, all optional."""

    choices: Sequence[str] | None
    task: Task | None


class TextOptions(AskOptions, total=False):
    """The keyword arguments of `Captioner.generate_text`, all optional."""

    text_prefix: TextPrefix | None


class Captioner:
    """Answers prompts about pictures. Thread-safe: calls wait for each other.

    >>> from llama_adapter import Captioner
    >>> with Captioner.load() as captioner:
    ...     answer = captioner.ask("photo.jpg", "Is there a red circle?", choices=["Yes", "No"])
    """

    def __init__(self, parts: Parts, *, engine: Engine | None = None) -> None:
        """Users call `load` or `from_spec`. By default, `engine` is a new one around the runner of `parts`."""
        if not isinstance(parts, Parts):
            raise TypeError(f"Wanted the parts of a model, got {parts!r}: `Captioner.load` takes a model's paths")
        self.spec, self.info, self.tokenizer = parts.spec, parts.info, parts.model.tokenizer
        self.oom_retry = OomRetry(empty_caches=parts.backend.empty_caches)
        self._backend, self._vision, self._ood_detector = parts.backend, parts.vision, parts.model.ood_detector
        self._close_parts, self._is_closed = parts.close, False
        self.pixels: PixelRule = parts.vision.pixels  # how pictures become the pixels that the encoder takes
        self._engine = engine or Engine(parts.runner, eos_id=self.tokenizer.end_ids)
        self._trace: Trace | None = None
        self._turn = threading.Lock()  # held while a loop is open
        self._running_in: int | None = None  # the thread that opened it, or read it last
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="captioner")  # for `agenerate`, `astream`
        self.allowed_hosts: tuple[AllowedHost, ...] = ()  # that pictures are downloaded from
        # The default of `run`; may be replaced.
        self.reader: Reader = PictureReader(self.spec.pictures, pixels=self.pixels)
        form = self.info.picture_format
        self._prompts = PromptEncoder(
            self.tokenizer, check=self._engine.check, template=self.info.template, pictures=form
        )
        self._grammars = Grammars(self.tokenizer)
        order: ChannelOrder = "bgr" if self.spec.channel_order == "bgr" else "rgb"
        self._text_prefixes = TextPrefixes(zeros=zero_picture(self.pixels, channel_order=order))

    @classmethod
    def load(
        cls,
        model: StrPath | None = DEFAULTS.model,
        *,
        llama_dir: StrPath | None = DEFAULTS.llama_dir,
        llama_type: str | None = DEFAULTS.llama_type,
        adapter: StrPath | None = DEFAULTS.adapter,
        clip: StrPath | None = DEFAULTS.clip,
        lora: StrPath | Sequence[StrPath] = DEFAULTS.lora,
        visual_heads: int | None = DEFAULTS.visual_heads,
        channel_order: WantedOrder = DEFAULTS.channel_order,
        context: int | None = DEFAULTS.context,
        prompt_template: Template | None = DEFAULTS.prompt_template,
        vision: VisionKind | None = DEFAULTS.vision,
        past_key_values: StrPath | None = DEFAULTS.past_key_values,
        decoder: StrPath | None = DEFAULTS.decoder,
        decoder_backend: MindirBackend | None = DEFAULTS.decoder_backend,
        ge_config: StrPath | None = DEFAULTS.ge_config,
        encoder: StrPath | None = DEFAULTS.encoder,
        encoder_process: bool = DEFAULTS.encoder_process,
        encoder_device: int | str | None = DEFAULTS.encoder_device,
        provider_option: Sequence[str] = DEFAULTS.provider_option,
        provider_config: StrPath | None = DEFAULTS.provider_config,
        device: "str | torch.device" = DEFAULTS.device,
        dtype: "str | torch.dtype" = DEFAULTS.dtype,
        precision: Precision | None = DEFAULTS.precision,
        mode: str = DEFAULTS.mode,
        strict: bool = DEFAULTS.strict,
        operators: OperatorChoice = DEFAULTS.operators,
        tensor_parallel: int = DEFAULTS.tensor_parallel,
        parallel_timeout: float = DEFAULTS.parallel_timeout,
        exif: Orientation = DEFAULTS.exif,
        transparency: Transparency = DEFAULTS.transparency,
        damaged: Damaged = DEFAULTS.damaged,
        reading: Reading = DEFAULTS.reading,
        batch_size: BatchSize = DEFAULTS.batch_size,
        allowed_hosts: Iterable[str] = (),
    ) -> Self:
        """Load a model onto a device.

        Parameters:
            model: folder of a bundle, or a name such as `"bias-7b"`, which `llama-adapter get` fetched. None: the
                embedded model, or the checkpoints at `llama_dir`.
            llama_dir: folder of LLaMA as Meta ships it, or of a Hugging Face model, a GGUF file, or a name. Without
                `adapter`, for prompts without a picture.
            llama_type: sub-folder of `llama_dir`, such as `"7B"`.
            adapter: adapter file, such as `BIAS-7B.pth`.
            clip: CLIP file, such as `ViT-L-14.pt`. None: the adapter file contains CLIP, or an `encoder` replaces it.
            lora: LoRA folders of Hugging Face PEFT, merged into LLaMA's weights: one or several, each as a path or as
                `"FOLDER=WEIGHT"`. They are summed with their weights.
            visual_heads: attention heads of the visual blocks, at least 1. Default: 16 for width 768.
            channel_order: colour order in training: `"auto"` (default), `"rgb"` or `"bgr"`.
            context: tokens of prompt and answer together, at least 1. Default: the bundle's, else 512, 2048 for chat.
            prompt_template: format of prompts: `"instruction"` as the adapters were trained, `"conversation"` of the
                chat adapters, or `"chat"`, the chat template of the model's own files. Default: that of the training;
                without adapter `"chat"` if the model has one, else `"instruction"`.
            vision: what runs the picture encoder: `"torch"` (default), `"onnx"` or `"om"`; `"prefixes"` if all pictures
                come from prefix files, so that no encoder is needed.
            past_key_values: keys and values in front of every prompt, as prefix tuning and P-Tuning v2 learn them:
                PaddleNLP's `pre_caches.npy`, or a folder with it or with a PEFT adapter. They count in `context`.
            decoder: folder of an exported decoder. With an exported encoder (in this folder or as `encoder`), torch is
                not used.
            decoder_backend: what runs MindIR graphs: `"ms"` (default), MindSpore, or `"mslite"`, MindSpore Lite.
            ge_config: a `config.ini` of MindSpore Lite, for MindIR graphs on Ascend.
            encoder: file of an exported encoder, for `vision` onnx and om; a prefix file or folder, for prefixes.
            encoder_process: run the exported encoder in its own process. Default: False.
            encoder_device: device of an OM, 0 to 255; default: the decoder's device if it can run an OM, else 0. For
                onnx `"cpu"` (default), `"cuda:0"` or `"npu:0"`.
            provider_option: options of onnxruntime's execution provider, such as `"gpu_mem_limit=1000000000"`.
            provider_config: INI file with such options, in sections such as `[CUDAExecutionProvider]`.
            device: `"auto"` (default: an NPU, else a GPU, else the CPU), `"cpu"`, `"cuda"`, `"cuda:1"`, `"npu:0"`, ...,
                or a `torch.device`.
            dtype: `"auto"` (default: the dtype that the device computes best), `"float32"`, `"bfloat16"` or
                `"float16"`, or a `torch.dtype`.
            precision: of the weights of linear layers, `"float"`, `"int8"` or `"int4"`. Default: as stored.
            mode: `"auto"` (default: the graph mode of a GPU, else eager), `"eager"`, `"graph"`, or the name of one of
                the device's graph modes. A graph mode that the device lacks runs eager, with a warning.
            strict: raise DeviceError for a graph mode that the device lacks. Default: False.
            operators: `"auto"` (default), `"aten"` to avoid fused operators, or `"w8a8"`, which with int8 weights
                rounds the inputs of linear layers to 8 bits too.
            tensor_parallel: ranks that share the decoder, each a process with its own device. Default: 1. They are
                started on this machine, unless `torchrun` has started them.
            parallel_timeout: seconds that a rank waits for the others in a step before all ranks end. Default: 60.
            exif: `"upright"` (default) applies the orientation that cameras store, `"ignore"` does not.
            transparency: `"white"` (default) puts transparent pictures on white, as viewers do; `"ignore"` shows the
                colours stored for transparent pixels, as CLIP does.
            damaged: `"refuse"` (default), or `"answer"` for what can be decoded of damaged pictures.
            reading: `"exact"` (default), or `"fast"`: pixels may differ by about one level, large JPEGs take less time.
            batch_size: questions answered together, at least 1, or `"auto"`. Default: 8.
            allowed_hosts: hosts whose http(s) addresses may be given as pictures, such as `"example.com"`,
                `"*.example.com"` or `"http://example.com:8080"`. Every address that a name resolves to must be public.

        None means the default. Raises ValueError for values out of range and options that exclude each other,
        CheckpointError and GraphError for files, UsageError for names not fetched, and DeviceError for devices.
        """
        given = dict(locals())
        values = {name: given[name] for name in CaptionerSpec.__dataclass_fields__ if given[name] is not None}
        for name in {"device", "dtype"} & values.keys():
            values[name] = str(values[name]).removeprefix("torch.")
        allowed = tuple(map(AllowedHost.parse, texts("allowed_hosts", allowed_hosts or ())))
        captioner = cls.from_spec(CaptionerSpec(**values))
        captioner.allowed_hosts = allowed
        if captioner.info.mode == "eager" and values.get("mode", DEFAULTS.mode) not in (DEFAULTS.mode, "eager"):
            warnings.warn(f"Steps run eager: mode `{mode}` cannot be used on {captioner.info.device}", stacklevel=2)
        return captioner

    @classmethod
    def from_spec(cls, spec: CaptionerSpec) -> Self:
        """Load the model of a spec; raises the errors of `load`."""
        if not isinstance(spec, CaptionerSpec):
            raise TypeError(f"Wanted a CaptionerSpec, got {spec!r}: `Captioner.load` takes a model's paths")
        return cls(_open_parts(spec))

    @property
    def batch_size(self) -> int:
        """Questions answered together. An out-of-memory error reduces it."""
        return self._engine.num_slots

    @property
    def compiles_slowly(self) -> bool:
        """Whether each new shape of a program is compiled for long, so that even a few pictures need a warm-up."""
        return self.info.mode not in PLAIN_MODES and self._backend.capabilities.static_shapes

    @property
    def image_size(self) -> int:
        """Side of the square that the encoder takes, in pixels."""
        return self.pixels.image_size

    def profile_clock(self, *, waits: bool = True) -> StageClock:
        """A clock to pass as `clock`.

        With `waits`, the clock waits for the device at each stage. Otherwise it puts marks into the device's queue; a
        stage's device time then runs from the end of earlier work to the end of the stage's own work.
        """
        return StageClock(synchronise=self._backend.synchronise) if waits else StageClock(mark=self._backend.mark)

    @contextmanager
    def tracing(self, folder: StrPath, *, tell: Callable[[str], None] = lambda text: None) -> Iterator[None]:
        """Write a trace of the calls inside the context into `folder`, which is created if missing; see `Trace`.

        The trace contains only calls of the same thread. `tell` is called with a sentence when the trace is written.
        Raises OSError if the folder cannot be created, and RuntimeError if this captioner is being traced already.
        """
        if self._trace is not None:
            raise RuntimeError("This Captioner is being traced already")
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._trace = Trace(self._backend.profiler, Path(folder), tell=tell)
        try:
            yield
        finally:
            trace, self._trace = self._trace, None
            trace.close()

    def close(self) -> None:
        """Release exported graphs, with their devices and processes, and end other ranks. Can be called again.

        From then on, all calls that answer raise RuntimeError, and so does a stream that has not ended.
        """
        self._is_closed = True
        self._worker.shutdown(wait=False)
        self._close_parts()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Captioner is not copied or pickled: share it between threads, load one in each process")

    def __repr__(self) -> str:
        info = self.info
        return (
            f"Captioner({info.name!r}, device={info.device!r}, dtype={info.dtype!r}, precision={info.precision!r}, "
            f"vision={info.vision!r}, context={info.context}, batch_size={self.batch_size})"
        )

    def caption(self, picture: Pictures, **options: Unpack[AskOptions]) -> Answer:
        """Describe one picture, or several together as in `ask`. The parameters are those of `generate` without `n`."""
        return self._one(picture, None, **options)

    def ask(self, picture: Pictures, question: Prompt, **options: Unpack[AskOptions]) -> Answer:
        """Answer a question about one picture, or about several together if the model sees pictures as tokens.

        The parameters are those of `generate` without `n`. Raises ValueError for several if the model sees one picture.
        """
        return self._one(picture, [question], **options)

    def _one(self, picture: Pictures, prompts: list[Prompt] | None, /, **options: Unpack[AskOptions]) -> Answer:
        if wrong := {"prompt", "prompts", "question"} & options.keys():
            raise TypeError(f"`caption` and `ask` have no option {wrong.pop()!r}: call `ask(picture, question)`")
        if (n := options.pop("n", 1)) != 1:
            raise ValueError(f"`caption` and `ask` give one answer: n must be 1, got {n!r}; `generate` gives several")
        return _answers(self._stream(partial(self._only, picture), prompts, **options))[0]

    def _only(self, picture: Pictures) -> list[GivenPicture]:
        given = self._given(picture)
        if len(given) > 1 and self.info.picture_format is not None:
            names = [f"picture {index}" if one.name is None else one.name for index, one in enumerate(given)]
            return [GivenPicture(given[0].source, " and ".join(names), tuple(one.source for one in given[1:]))]
        if len(given) != 1:
            raise ValueError(f"Wanted one picture, got {len(given)}: `generate` answers for several")
        return given

    def _given(self, pictures: Pictures) -> list[GivenPicture]:
        return given_pictures(pictures, allowed=self.allowed_hosts, reader=self.reader)

    def generate(
        self,
        pictures: Pictures,
        prompts: Iterable[Prompt] | str | Dialogue | RawPrompt | None = None,
        **options: Unpack[AskOptions],
    ) -> list[Answer]:
        """Answer a prompt about each picture; returns the answers in the order of the pictures.

        A picture that cannot be read gives an answer with `error`; the others are not affected.

        Parameters:
            pictures: one or several: paths, http(s) addresses of `allowed_hosts`, data URIs, bytes of picture files,
                binary files, PIL images, and arrays or tensors of pixels. A folder stands for the pictures in it, a
                pattern such as `"photos/**/*.jpg"` for its matches, a tar archive for its members, a prefix file or
                folder for the pictures that `llama-adapter encode` encoded. Iterators are read to their end first.
                Pixels are RGB of any size, uint8 or floats (0 to 1, or 0 to 255 with a largest value of at
                least 2), (H, W, 3) or (3, H, W), or (B, H, W, 3) for B pictures.
            prompts: one for each picture, or a single one for all. None: the model's own caption prompt. A prompt is
                an instruction, a `RawPrompt`, or in a list a pair (instruction, input) or a list of token ids.
            choices: at least two different texts; the answer is the most likely one. `Answer.choice` has the
                probability of each. Sampling options then have no effect.
            task: the form of the answers; excludes `choices`. Default: free text.
            n: answers to each prompt, at least 1. Those about one picture follow each other, and `index` counts all.
                With a seed, answer i of a prompt has seed + i. Default: 1.
            logprobs: `Answer.logprobs` has the log-probability of each token, before temperature and the other
                options of sampling, and of this number of the likeliest tokens in its place. Default: None.
            clock: measures stage times, see `profile_clock`.
            progress: show a progress bar, with tqdm.
            max_new_tokens: maximum number of tokens of an answer, at least 0. Default: 64.
            temperature: at least 0. 0 (default) takes the most likely token.
            top_p: 0 to 1, with a temperature above 0: tokens are drawn from the smallest set with this probability.
                Default: 0.75.
            top_k: at least 0: tokens are drawn from the `top_k` most likely ones. 0 (default) keeps all.
            min_p: 0 to 1: tokens less likely than this share of the likeliest one's probability are not drawn. 0
                (default) keeps all.
            seed: makes drawn answers repeatable. Default: None, different ones each time.
            repetition_penalty: 0.01 to 100: for tokens in prompt or answer, divides positive logits and multiplies
                negative ones. 1 (default) changes nothing.
            presence_penalty: -2 to 2, as OpenAI defines it: subtracted from the logit of each token that the answer
                has. Default: 0.
            frequency_penalty: as `presence_penalty`, for each time that the token occurs in the answer. Default: 0.
            stop: texts that end the answer; they are not part of it. Default: none.
            stop_token_ids: tokens that end the answer, as the model's end token does. Default: none.
            max_length: maximum number of tokens of prompt and answer together, at least 1. Default: the model's
                context.
            max_prompt_tokens: a longer prompt keeps its first token and its end, and its answer has
                `details["prompt_tokens_cut"]`. Default: None, a prompt longer than the context raises.
            json_schema: the answer is JSON of this schema, an object or its text. Needs the extra `structured`. An
                answer that ends by `max_new_tokens` is a beginning of such JSON, with `finish` "length".
            regex: the whole answer matches this regular expression, without look-around or back-references. As
                `json_schema`, which it excludes.

        Errors are raised before anything is computed: TypeError for a value that is not a picture or prompt, ValueError
        for arguments out of range or counts that do not match, PromptTooLongError for a prompt longer than the context,
        PromptError for a prompt that cannot be encoded, its subclass GrammarError for a `json_schema` or `regex` that
        cannot be followed, and ImportError for `progress` without tqdm.
        """
        return _answers(list(self.stream(pictures, prompts, **options)))

    async def agenerate(
        self,
        pictures: Pictures,
        prompts: Iterable[Prompt] | str | Dialogue | RawPrompt | None = None,
        **options: Unpack[AskOptions],
    ) -> list[Answer]:
        """As `generate`, for an event loop. Calls are answered one after the other. Cancelling a call ends it."""
        async with aclosing(self.astream(pictures, prompts, **options)) as events:
            return _answers([event async for event in events])

    def astream(
        self,
        pictures: Pictures,
        prompts: Iterable[Prompt] | str | Dialogue | RawPrompt | None = None,
        **options: Unpack[AskOptions],
    ) -> AsyncGenerator[Event]:
        """As `stream`, for an event loop: `stream` runs in a thread, one call after the other.

        If you leave the loop early, close the generator, for example with `contextlib.aclosing`.
        """
        return self._in_worker(lambda: self.stream(pictures, prompts, **options))

    async def _in_worker(self, open_stream: Callable[[], Generator[Event]]) -> AsyncGenerator[Event]:
        import asyncio

        self._require_open()
        self._refuse_own_thread()
        loop, is_left = asyncio.get_running_loop(), threading.Event()
        events: asyncio.Queue[Event | None] = asyncio.Queue()

        def work() -> None:
            try:
                with closing(open_stream()) as stream:
                    for event in stream:
                        if is_left.is_set():
                            return
                        loop.call_soon_threadsafe(events.put_nowait, event)
            finally:
                loop.call_soon_threadsafe(events.put_nowait, None)

        done = loop.run_in_executor(self._worker, work)
        try:
            while (event := await events.get()) is not None:
                yield event
            await done  # raises what the thread raised
        finally:
            is_left.set()
            done.cancel()

    def stream(
        self,
        pictures: Pictures,
        prompts: Iterable[Prompt] | str | Dialogue | RawPrompt | None = None,
        **options: Unpack[AskOptions],
    ) -> Generator[Event]:
        """As `generate`, token by token: yields a `TextDelta` for each new piece of text, and each complete `Answer`.

        The parameters are those of `generate`. `index` says which picture an event belongs to. Read the stream to its
        end, or close it. Until then, calls from other threads wait, and a call from the same thread raises
        RuntimeError.
        """
        return self._stream(partial(self._given, pictures), prompts, **options)

    def _stream(
        self,
        given: Callable[[], list[GivenPicture]],
        /,
        prompts: Iterable[Prompt] | str | Dialogue | RawPrompt | None = None,
        *,
        choices: Sequence[str] | None = None,
        task: Task | None = None,
        **options: Unpack[RunOptions],
    ) -> Generator[Event]:
        self.info.require_sight()
        task, default = _task_of(task, choices), self.info.default_prompt
        return self._stream_items(lambda: work_items(given(), prompts, default_prompt=default, task=task), **options)

    def generate_text(self, prompts: Prompts, **options: Unpack[TextOptions]) -> list[Answer]:
        """Answer prompts without a picture; returns the answers in the order of the prompts.

        Parameters:
            prompts: one or several. One prompt is a text (an instruction), a tuple (instruction, input), a `Dialogue`,
                a `RawPrompt` or a list of token ids. Several are passed as a list or another iterable.
            text_prefix: what the model attends to instead of a picture. `"zeros"`: a picture of zeros, as in the
                training of LLaMA-Adapter V2 on texts. `"none"`: nothing; adapter attention adds exactly zero.
                `"learned"`: the learned prompt of a LLaMA-Adapter V1 adapter. Default: as in the model's training.

        The other parameters are those of `generate`. As in `generate`, ValueError, TypeError, PromptTooLongError,
        PromptError and ImportError are raised before anything is computed.
        """
        return _answers(list(self.stream_text(prompts, **options)))

    def stream_text(
        self,
        prompts: Prompts,
        *,
        text_prefix: TextPrefix | None = None,
        choices: Sequence[str] | None = None,
        task: Task | None = None,
        **options: Unpack[RunOptions],
    ) -> Generator[Event]:
        """As `generate_text`, token by token: yields a `TextDelta` for each new text, and each complete `Answer`."""
        prefix, task = self.info.text_prefix(text_prefix), _task_of(task, choices)
        return self._stream_items(partial(text_items, prompts, text_prefix=prefix, task=task), **options)

    async def agenerate_text(self, prompts: Prompts, **options: Unpack[TextOptions]) -> list[Answer]:
        """As `generate_text`, for an event loop; see `agenerate`."""
        async with aclosing(self.astream_text(prompts, **options)) as events:
            return _answers([event async for event in events])

    def astream_text(self, prompts: Prompts, **options: Unpack[TextOptions]) -> AsyncGenerator[Event]:
        """As `stream_text`, for an event loop; see `astream`."""
        return self._in_worker(lambda: self.stream_text(prompts, **options))

    def _stream_items(
        self,
        given_items: Callable[[], Sequence[WorkItem]],
        /,
        *,
        n: int = 1,
        logprobs: int | None = None,
        clock: StageClock | None = None,
        progress: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[Event]:
        self._require_open()
        _refuse_unknown(sampling)
        if not isinstance(clock, StageClock | None):
            raise TypeError(f"clock must be a StageClock of `profile_clock`, got {clock!r}")
        params = SamplingParams(**sampling)
        count = whole_number("n", n, least=1)
        num_logprobs = None if logprobs is None else whole_number("logprobs", logprobs, least=0)
        bar = import_module("tqdm.auto").tqdm if progress else None
        items = given_items()  # reads the images of an iterator
        for item in items:
            for question in item.questions:  # errors must come before any work
                grids = self.least_grids(item.num_pictures)
                self.encode_prompt(question.prompt, question.task, sampling=params, grids=grids)
        items = [item.repeated(count) for item in items]
        events = self.run(items, sampling=params, logprobs=num_logprobs, clock=clock)
        return events if bar is None else _shown(events, bar=partial(bar, total=count * len(items), unit="answer"))

    def run(
        self,
        items: Iterable[WorkItem],
        *,
        sampling: SamplingParams,
        logprobs: int | None = None,
        clock: StageClock | None = None,
        reader: Reader | None = None,
        wants: Wants | None = None,
        may_wait: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> Generator[Event]:
        """Answer a stream of work items; yields events in order of completion.

        Memory use does not depend on the number of items. Closing the iterator drops the questions in flight.

        Parameters:
            items: pictures with their questions. Each question gets one answer; if it fails, the answer has `error`.
            sampling: for all questions.
            logprobs: as in `generate`.
            clock: measures stage times, see `profile_clock`.
            reader: reads pictures; it is not closed. Default: `self.reader`.
            wants: called with an item and its picture's digest, in reading threads; returns the questions to answer. If
                it returns none, the picture is not decoded.
            may_wait: whether `items` may block. If so, it is iterated in its own thread, and questions already read are
                answered meanwhile. Otherwise it is iterated in the caller's thread.
            stop: once it returns True, no more pictures are begun.

        Waits while another thread's run is open. Raises RuntimeError if a run of this thread is open. An exception of
        `items` is raised after all earlier answers were yielded.
        """
        with read_ahead(
            items,
            reader=reader or self.reader,
            batch_size=self.batch_size,
            device=self.spec.device,
            wants=wants,
            may_wait=may_wait,
            stop=stop,
        ) as pictures:
            yield from self.answer_read(
                pictures,
                sampling=sampling,
                logprobs=logprobs,
                clock=clock or StageClock(),
                stop=stop,
            )

    def answer_read(
        self,
        pictures: Prefetcher[WorkItem, Looked],
        *,
        sampling: SamplingParams,
        logprobs: int | None = None,
        clock: StageClock,
        stop: Callable[[], bool] = lambda: False,
    ) -> Generator[Event]:
        """As `run`, for pictures that `read_ahead` reads."""
        with self.open_loop(clock) as loop:
            while True:
                self._require_open()
                # `num_wanted` gives the encoder large batches, and bounds the work lost when the run is interrupted.
                while not pictures.is_exhausted and (num_wanted := loop.num_wanted) and not stop():
                    clock.enter("read")
                    # Do not wait for a picture while there are questions to answer.
                    least = loop.least_ready(num_wanted)
                    if loop.in_flight and not pictures.has_ready(least):
                        break
                    batch = pictures.take(num_wanted, at_least=0 if loop.in_flight else least)
                    if not batch:
                        break
                    clock.seconds["read"] += sum(item.read_s for item, *_ in batch)
                    errors = self._admit(batch, loop, sampling=sampling, logprobs=logprobs)
                    clock.enter("write")
                    yield from self._told(errors)
                if not loop.in_flight:
                    return
                events = loop.step()
                clock.enter("write")
                yield from self._told(events)

    def _told(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            self._running_in = threading.get_ident()  # it may differ from one event to the next
            yield event

    @contextmanager
    def open_loop(self, clock: StageClock) -> Iterator[CaptionLoop]:
        """The loop through this captioner's encoder and engine, closed at the end of the context.

        Waits while another thread's loop is open. Raises RuntimeError if a loop of this thread is open.
        """
        self._require_open()
        self._refuse_own_thread()
        with self._turn:
            clock.trace = self._trace
            loop = CaptionLoop(
                vision=self._vision,
                engine=self._engine,
                tokenizer=self.tokenizer,
                clock=clock,
                text_prefixes=self._text_prefixes,
                oom_retry=self.oom_retry,
                ood_detector=self._ood_detector,
                makes_tokens=self.info.picture_format is not None,
            )
            try:
                self._running_in = threading.get_ident()
                yield loop
            except BaseException as error:
                with suppress(RankError):  # if ranks have failed, closing fails too
                    loop.close()
                if isinstance(error, GraphError):  # the graphs were closed by another thread?
                    self._require_open()
                raise
            else:
                loop.close()
            finally:
                self._running_in = None

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("This Captioner is closed and answers no more: load another one")

    def _refuse_own_thread(self) -> None:
        """Raise RuntimeError if a stream of this thread is open: waiting for it would never end."""
        if self._running_in == threading.get_ident():
            gc.collect()  # a web framework may leave the stream of a client that is gone in a cycle
        if self._running_in == threading.get_ident():
            raise RuntimeError("This Captioner is still answering another call: read its stream to the end or close it")

    def _admit(
        self, readings: Sequence[Looked], loop: CaptionLoop, *, sampling: SamplingParams, logprobs: int | None
    ) -> list[Answer]:
        """Encode pictures and submit their questions; returns the answers of questions that failed before that."""
        errors: list[Answer] = []
        asked: list[tuple[Content, list[ActiveRequest]]] = []
        for reading in readings:
            requests = []
            for question in reading.questions:
                request, error = self._begin(question, reading, sampling=sampling, logprobs=logprobs)
                if error is None:
                    requests.append(request)
                else:
                    errors.append(request.failed(error))
            if requests:
                asked.append((reading.picture.content, requests))
        if asked:
            loop.start(asked)
        return errors

    def _begin(
        self, question: WorkQuestion, reading: Looked, *, sampling: SamplingParams, logprobs: int | None
    ) -> tuple[ActiveRequest, AnswerError | None]:
        """The request for a question, and the error that prevents an answer, if any. Its times include reading."""
        picture, error = reading.picture, reading.picture.error
        try:
            grids = self.grids_of(picture)
            prompt = self.encode_prompt(question.prompt, question.task, sampling=sampling, grids=grids)
        except (PromptError, PromptTooLongError, ValueError) as refusal:
            # Only this question fails: it may be one line of many in a manifest.
            prompt = EncodedPrompt(text=shown_prompt(question.prompt))
            error = error or AnswerError(code="prompt", message=str(refusal))
        request = ActiveRequest(
            index=question.index,
            picture=reading.item.label,
            digest=picture.digest,
            notes=picture.notes,
            prompt=prompt,
            sampling=sampling.numbered(question.number),
            task=question.task,
            num_logprobs=logprobs,
            started=time.perf_counter() - picture.elapsed_ms / 1e3,
            ms={"read": picture.elapsed_ms},
            tag=question.tag,
        )
        return request, error

    def least_grids(self, num_pictures: int) -> tuple[Grid, ...]:
        """The grids of so many pictures if they are not cut; empty if the model does not see pictures as tokens."""
        return ((0, 0),) * num_pictures if self.info.picture_format is not None else ()

    def grids_of(self, picture: PictureReading) -> tuple[Grid, ...]:
        """The grids of pictures that were read; empty if the model does not see pictures as tokens."""
        if self.info.picture_format is None or picture.pixels is None:
            return ()
        return tuple(grid_of(pixels, side=self.image_size) for pixels in (picture.pixels, *picture.others))

    def warm_up(self, prompt: Prompt | None = None, *, max_new_tokens: int = SamplingParams.max_new_tokens) -> WarmUp:
        """Compile the programs of a graph mode before the first picture.

        Parameters:
            prompt: a prompt as long as those to come. None: the model's own caption prompt.
            max_new_tokens: maximum number of tokens of an answer, at least 0.

        After an out-of-memory error, nothing is compiled and the number of rows is halved. Raises the errors of
        `encode_prompt`, and RuntimeError while questions are being answered.
        """
        self._require_open()
        prompt = self.info.default_prompt if prompt is None else prompt
        encoded = self.encode_prompt(prompt, grids=self.least_grids(1))
        engine = self._engine
        new_tokens = SamplingParams(max_new_tokens=max_new_tokens).max_new_tokens
        run = partial(engine.warm_up, prompt_tokens=len(encoded.token_ids), new_tokens=new_tokens)
        done = attempt(run, is_least=engine.num_rows == 1)
        if done is None:
            self.oom_retry.fewer_rows(engine, num_rows=engine.num_rows)
            return WarmUp(seconds=0.0, programs=0)
        return done

    def encode_prompt(
        self,
        prompt: Prompt,
        task: Task = FREE_TEXT,
        *,
        sampling: SamplingParams | None = None,
        grids: tuple[Grid, ...] = (),
    ) -> EncodedPrompt:
        """Encode a prompt and the continuations of its task as token ids. Thread-safe.

        `grids` are those of the prompt's pictures, for a model that sees pictures as tokens.

        Of `sampling`, only `max_prompt_tokens` and the form of the answer are used; the form is prepared too. A prompt
        of more than `max_prompt_tokens` tokens keeps its first token and its end. Raises PromptTooLongError,
        PromptError or ValueError for a prompt that cannot be answered, GrammarError for a form that cannot be followed,
        and UsageError without the package for forms.
        """
        sampling = sampling or SamplingParams()
        encoded = self._prompts.encode(prompt, task.continuations, max_tokens=sampling.max_prompt_tokens, grids=grids)
        grammar = None if encoded.continuations else self._grammars.of(sampling)
        # The form says where the answer ends, so a text that ends answers of the template may occur in it.
        return encoded if grammar is None else replace(encoded, grammar=grammar, stop=())


def _open_parts(spec: CaptionerSpec) -> Parts:
    """Load the model of a spec onto its device. Torch is imported only for models that need it."""
    if not spec.is_embedded:
        from llama_adapter.app.models.named.located import located_spec

        spec = located_spec(spec)
    if spec.decoder is not None:
        from llama_adapter.app.captioning.assemble_exported import assemble_exported

        return assemble_exported(spec)
    from llama_adapter.app.captioning.assemble_arrays import assemble_arrays

    files = marks_of(spec)
    if (parts := assemble_arrays(spec)) is None:
        require_model(spec)
        try:
            from llama_adapter.app.captioning.assemble import assemble_with_torch
        except RuntimeError as error:
            note_torch_import(error)
            raise
        parts = assemble_with_torch(spec)
    KnownModel(spec=parts.spec, info=parts.info, pixels=parts.vision.pixels).remember(spec, files=files)
    return parts


def _task_of(task: Task | None, choices: Sequence[str] | None) -> Task:
    """Raises ValueError if both are given, TypeError for another `task`, and the errors of `choosing`."""
    if task is not None and choices is not None:
        raise ValueError("choices and task exclude each other")
    if task is not None and not hasattr(task, "continuations"):
        raise TypeError(f'task must be a Task, got {task!r}: give a question as a prompt, or choices=["Yes", "No"]')
    return choosing(choices) if task is None else task


def _refuse_unknown(options: Mapping[str, object]) -> None:
    """Raise TypeError for a name that is no option, with the most similar one."""
    known = (*TextOptions.__annotations__, "prompts")
    for name in options.keys() - SamplingOptions.__annotations__.keys():
        similar = nearest(name, known, cutoff=0.6)
        hint = f"the options are {', '.join(known)}" if similar in (None, name) else f"did you mean {similar!r}?"
        raise TypeError(f"Captioner got an unexpected keyword argument {name!r}: {hint}")


def _answers(events: Iterable[Event]) -> list[Answer]:
    """The answers among the events, in the order of the questions."""
    return sorted((event for event in events if isinstance(event, Answer)), key=lambda answer: answer.index)


def _shown(events: Generator[Event], *, bar: Callable[[], Any]) -> Generator[Event]:
    """Pass events on, and show a progress bar that counts answers."""
    with closing(events), bar() as shown:
        for event in events:
            if isinstance(event, Answer):
                shown.update()
            yield event
