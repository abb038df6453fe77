"""The parts of a captioner. Imports no torch: exported models run without it."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from llama_adapter.app.models.named.getting import terms
from llama_adapter.app.models.spec import CaptionerSpec, ModelInfo
from llama_adapter.app.pictures.prefixes.file import read_first_file
from llama_adapter.llm.conversation import Template
from llama_adapter.llm.runners.base import Runner
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.user_cache import cache_note

if TYPE_CHECKING:
    from llama_adapter.vision.backends.base import VisionBackend

M = TypeVar("M")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts of a captioner, on their device. The spec has all values resolved."""

    spec: CaptionerSpec
    info: ModelInfo
    model: Any  # with a `Tokenizer` and an `OodDetector | None`; from checkpoints a LoadedModel without its weights
    backend: Any  # a `runtime.devices.Backend`, or a `GraphBackend` without torch
    vision: "VisionBackend"
    runner: Runner
    end: Callable[[], None] = lambda: None  # ends the other ranks of a split decoder, or closes graphs

    def close(self) -> None:
        """Release exported graphs, with their devices and processes, and end other ranks. Can be called again."""
        try:
            self.vision.close()
        finally:
            self.end()


def loaded_parts(
    spec: CaptionerSpec,
    model: Any,
    *,
    backend: Any,
    vision: "VisionBackend",
    runner: Runner,
    dtype: str,
    mode: str,
    is_for_texts: bool,
    encoder: str | None = None,
    notes: Iterable[str],
    **others: Any,
) -> Parts:
    """The parts of a `LoadedModel` or an `ArrayModel`, with the spec and the description that it has when it is loaded.

    `encoder` is the identity of an exported encoder. Empty notes are left out. `others` are further fields of `Parts`.
    """
    model = without_misled_detector(model, spec, precision=model.precision)
    template, has_adapter = spec.prompt_template or model.template, model.decoder_config.num_adapter_layers > 0
    shared: dict[str, Any] = {"dtype": dtype, "precision": model.precision, "mode": mode}
    found = dataclasses.replace(
        spec,
        vision=spec.vision_kind,
        device=str(backend.device),
        batch_size=runner.config.num_slots,
        context=model.decoder_config.context,
        channel_order=model.vision_config.channel_order,
        **shared,
    )
    info = ModelInfo(
        name=model.name,
        digest=model.digest,
        device=backend.name,
        vision=vision.name,
        operators=runner.operators_name,
        encoder=encoder,
        notes=tuple(filter(None, (*notes, cache_note()))),
        context=runner.config.context,
        default_prompt=model.prompt,
        has_adapter=has_adapter and not is_for_texts,
        has_text_adapter=has_adapter and is_for_texts,
        template=template,
        template_id=template_id(template, own=model.template, chat_template=model.tokenizer.settings.chat_template),
        card=model.card or terms((spec.llama_dir, spec.adapter, spec.clip)),
        past=None if runner.config.past is None else runner.config.past.digest,
        picture_format=model.picture_format,
        **shared,
    )
    return Parts(spec=found, info=info, model=model, backend=backend, vision=vision, runner=runner, **others)


def without_misled_detector(model: M, spec: CaptionerSpec, *, precision: Precision) -> M:
    """The model, without its `OodDetector` if a 4-bit encoder encodes its pictures, or encoded them before.

    Rounding to 4 bits moves visual queries as far as other pictures do. `precision` is that of the model's own encoder,
    which counts if the spec names no other. Exported encoders have float weights.
    """
    if spec.encoder is not None:
        precision = FLOAT
        if spec.vision_kind == "prefixes" and (encoding := read_first_file(spec.encoder).encoding).encoder is None:
            precision = encoding.precision
    return dataclasses.replace(model, ood_detector=None) if precision == "int4" else model  # type: ignore[type-var]


def template_id(template: Template, *, own: Template, chat_template: str | None) -> str | None:
    """How records name the template of prompts; None for the instructions or conversations of the model's training."""
    if template == "chat":
        return f"chat {hashlib.sha256((chat_template or '').encode()).hexdigest()[:16]}"
    return None if template == own else template


class GraphBackend:
    """Replaces a torch device: graphs run when they are called, and the call returns when they are done."""

    def __init__(self, name: str) -> None:
        self.name, self.device = name, "cpu"

    def empty_caches(self) -> None:
        """Nothing is cached."""

    def synchronise(self) -> None:
        """Nothing is queued."""

    def mark(self) -> None:
        """Nothing is queued."""

    @property
    def profiler(self) -> Any:
        """Raises UsageError, because the profiler is part of torch."""
        raise UsageError(
            "An exported decoder has no trace: the profiler is torch's", hint="leave out --trace, or --decoder"
        )
