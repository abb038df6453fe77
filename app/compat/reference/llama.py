"""The module `llama` for the reference's programs: the same names and parameters, implemented with a `Captioner`."""

import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from llama_adapter.app.captioning.active_request import ActiveRequest
from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.tasks.prompts import RawPrompt
from llama_adapter.app.compat.reference.pictures import SessionEncoder, clip_transform, encoder_pixels
from llama_adapter.app.models.checkpoints import CLIP_CACHE, CLIP_FILE, RELEASED_ADAPTERS
from llama_adapter.app.models.llama_folder import find_llama, tokenizer_of
from llama_adapter.app.models.named.located import find_weights
from llama_adapter.app.models.spec import DEFAULT_BATCH_SIZE, CaptionerSpec
from llama_adapter.llm.conversation import format_prompt
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.tokenizer import Tokenizer as OwnTokenizer
from llama_adapter.llm.weights.adapter import open_adapter
from llama_adapter.runtime.devices import open_best
from llama_adapter.runtime.errors import CheckpointError, LlamaAdapterError, UsageError
from llama_adapter.runtime.terminal.stderr_lines import say

__all__ = ["LLaMA_adapter", "Tokenizer", "available_models", "format_prompt", "load"]

CACHED_CLIP: Final = CLIP_CACHE / CLIP_FILE
STAGES: Final = ("clip", "pre", "forward", "post", "decode")
_OF_ENCODER: Final = ("clip", "vision", "encoder", "provider")  # prefixes of the encoder's settings
_SOURCES: Final = ("llama_dir", "llama_type", "adapter", "clip", "visual_heads", "context")  # a bundle replaces them

# In the reference, these are modules of its package.
llama_adapter = tokenizer = utils = sys.modules[__name__]


class Tokenizer:
    """LLaMA's tokenizer with the methods of the reference."""

    def __init__(self, model_path: str | os.PathLike[str], *, own: OwnTokenizer | None = None) -> None:
        """Raises CheckpointError if the file is no tokenizer; `own` is one that was read already."""
        self._own = own or OwnTokenizer.load(model_path)
        self.n_words, self.bos_id, self.eos_id = self._own.vocab_size, self._own.bos_id, self._own.eos_id
        self.pad_id = -1

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        """The token ids of a text, with the begin id if `bos` and the end id if `eos`."""
        return [*self._own.encode(s, bos=bos), *([self.eos_id] if eos else [])]

    def decode(self, t: Sequence[int]) -> str:
        """The text of token ids; raises ValueError for ids outside the vocabulary."""
        return self._own.decode(t)


class LoadResult(NamedTuple):
    """The result of `load_state_dict`. Both lists are always empty, because wrong tensors raise CheckpointError."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class LLaMA_adapter(nn.Module):
    """A model with the interface of the reference. It is loaded when it is first needed.

    `to(device)` and similar methods choose the device on which it is then loaded. `half()` and `float()` have no
    effect; the flag --dtype sets the dtype. `clip_time`, `pre_time`, `forward_time`, `post_time` and `decode_time` are
    the times of the stages in the last `generate`, in milliseconds as in the Ascend guide's port, summed over all
    steps.

    `model, preprocess = load(...)` and `model = load(...)` both work: the reference returns a pair, the port the model.
    """

    overrides: ClassVar[Mapping[str, Any]] = {}  # fields of `CaptionerSpec` set by flags of `run-reference`
    clip_transform = staticmethod(clip_transform)

    def __init__(
        self,
        llama_ckpt_dir: str | os.PathLike[str],
        llama_tokenizer: str | os.PathLike[str] | None = None,
        max_seq_len: int = 512,
        max_batch_size: int = 1,
        clip_model: str = "ViT-L/14",
        v_embed_dim: int = 768,
        v_depth: int = 8,
        v_num_heads: int | None = None,
        *_sizes: Any,
        **_more_sizes: Any,
    ) -> None:
        """The reference's parameters. All other sizes come from the tensors.

        Parameters:
            llama_ckpt_dir: folder of a LLaMA.
            llama_tokenizer: path of its tokenizer. None: the tokenizer in or next to this folder.
            max_seq_len: most tokens of prompt and answer together.
            max_batch_size: most pictures in a batch.
            clip_model: a CLIP file. Any name means the file that OpenAI's package keeps in ~/.cache/clip.
            v_num_heads: heads of the visual blocks. None: 16 for width 768.

        Raises CheckpointError for a folder or tokenizer that cannot be used.
        """
        super().__init__()
        for stage in STAGES:
            setattr(self, f"{stage}_time", 0.0)
        self.anchor = nn.Parameter(torch.empty(0), requires_grad=False)  # has the device that the program chose
        values = {
            "llama_dir": os.fspath(llama_ckpt_dir),
            "context": max_seq_len,
            "visual_heads": v_num_heads,
            "batch_size": max(DEFAULT_BATCH_SIZE, max_batch_size),
            "clip": _clip_file(clip_model),
        }
        if "llama_dir" in self.overrides:
            values["llama_dir"] = _llama_folder(self.overrides["llama_dir"], self.overrides.get("llama_type"))
            llama_tokenizer = None
        if "model" in self.overrides:
            values = {name: value for name, value in values.items() if name not in _SOURCES}
        given = {name: value for name, value in self.overrides.items() if name not in ("llama_dir", "llama_type")}
        self._values = values | given
        self.tokenizer = _open_tokenizer(self._values, llama_tokenizer)
        self._session = SessionEncoder()
        self._captioners: dict[bool, Captioner] = {}  # the key: whether the program encodes the pictures
        self._lock = threading.Lock()

    def __getitem__(self, index: int) -> Any:
        """The pair (model, transform), for `model, preprocess = load(...)`."""
        return (self, self.clip_transform)[index]

    @property
    def device(self) -> torch.device:
        """The device where the model is, or will be loaded."""
        captioner = next(iter(self._captioners.values()), None)
        return self.anchor.device if captioner is None else torch.device(captioner.spec.device)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Set the adapter's tensors; returns empty lists of missing and unexpected names.

        Raises CheckpointError if they are not the tensors of an adapter, even if not `strict`.
        """
        if not {"adapter", "model"} & self.overrides.keys():
            # Written to a file, because adapters are read from files, checked and mapped into memory.
            folder = tempfile.mkdtemp(prefix="llama-adapter-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            file = os.path.join(folder, "state_dict.pth")
            torch.save({"model": dict(state_dict)}, file)
            self._use_adapter(file)
        return LoadResult([], [])

    def _use_adapter(self, file: str) -> None:
        open_adapter(file)
        self._values["adapter"] = file
        self._captioners.clear()

    def init_acl_weight(self) -> None:
        """Load the decoder now. Programs of the Ascend guide call this method."""
        self._captioner(encodes=True)

    def generate(self, *arguments: Any, **named: Any) -> list[str]:
        """One text for each picture and prompt, answered as a single batch.

        The reference calls `generate(imgs, prompts, max_gen_len=256, temperature=0.1, top_p=0.75)`. The Ascend guide
        calls `generate(clip, imgs, prompts, max_gen_len=1, temperature=0.1, top_p=0.75)` with an InferSession.

        Parameters:
            clip: session of an exported encoder; it gets `imgs` unchanged, except as `SessionEncoder` says.
            imgs: pictures, see `encoder_pixels`.
            prompts: for each picture a text, used without a template, or token ids.
            max_gen_len: most tokens of an answer.
            temperature: 0 or less takes the most probable token. Sampling depends on `torch.manual_seed`.
            top_p: tokens are sampled from the smallest set with this probability.

        Raises ValueError for shapes and counts that do not match, and the engine's errors.
        """
        with self._lock:
            if arguments and hasattr(arguments[0], "infer"):
                session, *others = arguments
                return self._generate(*others, clip=session, **named)
            return self._generate(*arguments, **named)

    def _generate(
        self,
        imgs: Any,
        prompts: Any,
        max_gen_len: int | None = None,
        temperature: float = 0.1,
        top_p: float = 0.75,
        *,
        clip: Any = None,
    ) -> list[str]:
        captioner = self._captioner(encodes=clip is not None)
        self._session.session = clip
        pixels: Sequence[np.ndarray] | np.ndarray
        if clip is None:
            pixels = encoder_pixels(imgs, captioner=captioner)
        else:
            pixels = imgs.cpu().numpy() if isinstance(imgs, Tensor) else np.asarray(imgs)
        if max_gen_len is None:
            max_gen_len = 256 if clip is None else 1
        if isinstance(prompts, str) or len(prompts) != len(pixels):
            came = "a single text" if isinstance(prompts, str) else len(prompts)
            raise ValueError(f"prompts must be a list of {len(pixels)}, one for each picture, got {came}")
        clock = StageClock()
        clock.enter("pre")
        requests = [
            ActiveRequest(
                index=index,
                picture=f"picture {index}",
                digest="",
                prompt=captioner.encode_prompt(RawPrompt(prompt) if isinstance(prompt, str) else [*map(int, prompt)]),
                sampling=SamplingParams(
                    max_new_tokens=int(max_gen_len),
                    temperature=max(float(temperature), 0.0),  # as in the reference, no temperature is greedy
                    top_p=float(top_p),
                    seed=int(torch.randint(2**62, (), device="cpu")) if temperature > 0 else None,
                ),
            )
            for index, prompt in enumerate(prompts)
        ]
        answers: dict[int, Answer] = {}
        with captioner.open_loop(clock) as loop:
            loop.start([(picture, [request]) for picture, request in zip(pixels, requests, strict=True)])
            while loop.in_flight:
                answers |= {event.index: event for event in loop.step() if isinstance(event, Answer)}
        for stage in STAGES:
            setattr(self, f"{stage}_time", clock.seconds[stage] * 1e3)
        failure = next((answer.error for answer in answers.values() if answer.error is not None), None)
        if failure is not None:
            raise LlamaAdapterError(failure.message)
        return [answers[index].text for index in range(len(requests))]

    _generate.__qualname__ = "LLaMA_adapter.generate"  # the name in messages about arguments

    def _captioner(self, *, encodes: bool) -> Captioner:
        """The loaded model. If `encodes`, the program encodes the pictures, so CLIP is not loaded."""
        if encodes not in self._captioners:
            values: dict[str, Any] = {"device": str(self.anchor.device), "transparency": "ignore"} | self._values
            if "model" not in values and "adapter" not in values:
                raise UsageError("The model has no adapter", hint="call `load_state_dict`, or load it by `llama.load`")
            if encodes:
                values = {name: value for name, value in values.items() if not name.startswith(_OF_ENCODER)}
            parts = assemble_parts(CaptionerSpec(**values), vision=self._session if encodes else None)
            self._session.query_shape = parts.model.decoder_config.num_queries, parts.model.decoder_config.dim
            info = parts.info
            for note in (f"{info.name} on {info.device} in {info.dtype}, pictures by {info.vision}", *info.notes):
                say(f"note: {note}")
            self._captioners[encodes] = Captioner(parts)
        return self._captioners[encodes]


def available_models() -> list[str]:
    """Names of the released adapters."""
    return list(RELEASED_ADAPTERS.values())


def load(name: str, llama_dir: str | os.PathLike[str], *arguments: Any, **named: Any) -> Any:
    """A model with an adapter, for `model, preprocess = load(...)` or `model = load(...)`. Downloads nothing.

    Parameters:
        name: file of an adapter, or the name of a released adapter, whose file must be in `download_root`.
        llama_dir: folder of a LLaMA, or of several.
        llama_type: sub-folder of `llama_dir`. None: 7B if it exists, otherwise `llama_dir` itself or its only model.
        device: the model's device. None: an accelerator if there is one. Earlier versions of the reference have this
            parameter in the position of `llama_type`, so a device is accepted there too.
        download_root: folder of released adapters. Default: ckpts.
        max_seq_len: most tokens of prompt and answer together. Default: 512.

    Raises CheckpointError if files are missing or cannot be used, and TypeError for other parameters.
    """
    names = ["llama_type", "device", "download_root", "max_seq_len", "phase"]
    if arguments and _is_device(arguments[0]):
        del names[0]
    if len(arguments) > len(names):
        raise TypeError(f"load() takes at most {2 + len(names)} positional arguments, got {2 + len(arguments)}")
    return _load(name, llama_dir, **dict(zip(names, arguments, strict=False)), **named)


def _load(
    name: str,
    llama_dir: str | os.PathLike[str],
    llama_type: str | None = None,
    device: str | torch.device | None = None,
    download_root: str | os.PathLike[str] = "ckpts",
    max_seq_len: int = 512,
    phase: str = "finetune",
) -> LLaMA_adapter:
    overrides = LLaMA_adapter.overrides
    model = LLaMA_adapter(
        _llama_folder(llama_dir, overrides.get("llama_type", llama_type)), max_seq_len=max_seq_len, phase=phase
    )
    if not {"adapter", "model"} & overrides.keys():
        model._use_adapter(_find_adapter(name, download_root))
    if "device" not in overrides:
        model.to(open_best()[0].device if device is None else device)
    return model


_load.__qualname__ = "load"  # the name in messages about arguments


def _is_device(value: Any) -> bool:
    try:
        torch.device(value)
    except (RuntimeError, TypeError):
        return False
    return True


def _llama_folder(llama_dir: str | os.PathLike[str], llama_type: str | None) -> str:
    if llama_type is None and os.path.isdir(os.path.join(llama_dir, "7B")):
        llama_type = "7B"
    return os.fspath(llama_dir) if llama_type is None else os.path.join(llama_dir, llama_type)


def _open_tokenizer(values: Mapping[str, Any], given: str | os.PathLike[str] | None) -> Tokenizer:
    """The tokenizer of a bundle or a LLaMA folder; raises CheckpointError if `given` is a different tokenizer."""
    if "model" in values:
        return Tokenizer(values["model"], own=tokenizer_of(values["model"]))
    place = find_llama(values["llama_dir"])
    file, own = place.require_tokenizer(), place.open_tokenizer()
    if given is not None and OwnTokenizer.load(given).data != own.data:
        raise CheckpointError(
            f"The tokenizer `{given}` differs from `{file}`, which is used with the LLaMA beside it",
            hint="put the right one beside the LLaMA, or into its folder",
        )
    return Tokenizer(file, own=own)


def _clip_file(clip_model: str) -> str | None:
    """The file of CLIP; None if it does not exist and a flag names an exported encoder."""
    if os.path.isfile(clip_model):
        return clip_model
    cached = CACHED_CLIP.expanduser()
    return None if "encoder" in LLaMA_adapter.overrides and not cached.is_file() else str(cached)


def _find_adapter(name: str, folder: str | os.PathLike[str]) -> str:
    """The file of an adapter; raises CheckpointError, which says where to get it and where to put it."""
    if os.path.isfile(name):
        return name
    released = name.removesuffix(".pth")
    digest = next((digest for digest, known in RELEASED_ADAPTERS.items() if known == released), None)
    if digest is None:
        raise CheckpointError(
            f"There is no adapter `{name}`: it is neither a file nor the name of a released one",
            hint=f"released are {', '.join(available_models())}; `run-reference --adapter FILE` takes any other file",
        )
    for file in (f"{digest}_{released}.pth", f"{released}.pth"):
        if os.path.isfile(os.path.join(folder, file)):
            return os.path.join(folder, file)
    weights = find_weights(released, "adapter")
    if weights is not None and (found := weights.source.here()) is not None:
        return str(found)
    raise CheckpointError(
        f"The adapter {released} is not in `{folder}`, and nothing is downloaded here",
        hint=f"`llama-adapter get {released}` downloads it; or put it into `{os.path.abspath(folder)}`, or pass "
        "`run-reference --adapter FILE`",
    )
