"""Looks at a model before it is used, key by key, and says in sentences what is wrong with it.

Nothing is imported here beyond the standard library until a check needs it: the first check is whether the packages
that Python finds are this project's at all.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from llama_adapter.app.models.checkpoints import LlamaFolder, ModelSources
    from llama_adapter.app.models.spec import Precision
    from llama_adapter.llm.tokenizer import Tokenizer
    from llama_adapter.llm.weights.adapter import AdapterFile
    from llama_adapter.llm.weights.source import LlamaSource
    from llama_adapter.runtime.graphs.card import EncoderCard
    from llama_adapter.vision.weights import ClipSource

Level = Literal["ok", "not tried", "warning", "error"]
T = TypeVar("T")
_DISTRIBUTION = "llama-adapter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was looked at, what was seen in one sentence, and what to do about it."""

    level: Level
    what: str
    sentence: str
    hint: str = ""


def diagnose(
    target: "ModelSources | str | os.PathLike[str]",
    *,
    encoder: "EncoderCard | None" = None,
    precision: "Precision | None" = None,
) -> list[Finding]:
    """Check a model: a bundle's folder, or the checkpoints it would be made of.

    With the card of an exported `encoder`, which takes CLIP's place, CLIP may be missing. A bundle's known answer is
    replayed in `precision`, its own where there is none.

    Every check that still makes sense is made, whatever the ones before it found. Files are read completely, their
    digests too, where they are known. Never raises for what is wrong with a model.
    """
    if isinstance(target, str | os.PathLike):
        return list(_diagnose_bundle(Path(target), precision))
    return list(_diagnose_sources(target, encoder=encoder))


class Report:
    """Collects the errors of attempts, so that the next attempt is made whatever became of the last."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []

    def attempt(self, what: str, action: Callable[[], T]) -> T | None:
        """What `action` returns; None where it raised one of the errors of files, which becomes a finding."""
        from llama_adapter.runtime.errors import CheckpointError, GraphError

        try:
            return action()
        except (CheckpointError, GraphError) as error:
            self._findings.append(Finding(level="error", what=what, sentence=error.message, hint=error.hint))
            return None

    def take(self) -> list[Finding]:
        """The findings since the last time."""
        findings, self._findings = self._findings, []
        return findings


def ok(what: str, sentence: str) -> Finding:
    """A finding about something that is right."""
    return Finding(level="ok", what=what, sentence=sentence)


def _diagnose_sources(sources: "ModelSources", *, encoder: "EncoderCard | None") -> Iterator[Finding]:
    from llama_adapter.app.models.checkpoints import find_clip, find_llama, open_clip, open_llama
    from llama_adapter.llm.tokenizer import Tokenizer
    from llama_adapter.llm.weights.adapter import open_adapter

    report = Report()
    place = report.attempt("llama", lambda: find_llama(sources.llama_dir, llama_type=sources.llama_type))
    tokenizer = llama = None
    if place is not None:
        tokenizer = report.attempt("tokenizer", lambda: Tokenizer.load(place.require_tokenizer()))
        llama = report.attempt("llama", lambda: open_llama(place))
    adapter = report.attempt("adapter", lambda: open_adapter(sources.adapter))
    clip: ClipSource | None = None
    if adapter is not None:
        clip = report.attempt("clip", lambda: find_clip(sources.clip, adapter))
    elif sources.clip is not None:
        clip = report.attempt("clip", lambda: open_clip(sources.clip or ""))
    yield from report.take()
    if adapter is None and clip is None and sources.clip is not None:
        yield from _swapped(adapter=sources.adapter, clip=sources.clip)
    if place is not None:
        yield from _check_listed_digests(place)
    if tokenizer is not None:
        yield ok("tokenizer", f"The tokenizer has {tokenizer.vocab_size} pieces")
    if llama is not None:
        yield from _describe_llama(llama, tokenizer)
    if adapter is not None:
        yield from _describe_adapter(adapter, llama)
        yield from _check_claimed_digest(adapter)
    if clip is not None:
        yield from _describe_clip(clip)
    if adapter is not None:
        yield from _check_vision(adapter, clip, sources, encoder=encoder)


def _describe_llama(llama: "LlamaSource", tokenizer: "Tokenizer | None") -> Iterator[Finding]:
    form = "Hugging Face's" if llama.half_split else "Meta's"
    yield ok(
        "llama",
        f"LLaMA in {form} form, {len(llama.files)} file(s), {len(llama.tensors)} tensors, none missing or unknown: "
        f"width {llama.dim}, {llama.num_layers} layers, {llama.num_heads} heads, {llama.vocab_size} tokens",
    )
    yield from _check_finite("llama", llama.name, ((name, split.read()) for name, split in llama.tensors.items()))
    if tokenizer is not None and tokenizer.vocab_size != llama.vocab_size:
        yield Finding(
            level="error",
            what="tokenizer",
            sentence=f"The tokenizer has {tokenizer.vocab_size} pieces, and the LLaMA in `{llama.name}` has "
            f"{llama.vocab_size} tokens",
            hint="take the `tokenizer.model` that came with these weights; LLaMA-7B's has 32000 pieces",
        )


def _describe_adapter(adapter: "AdapterFile", llama: "LlamaSource | None") -> Iterator[Finding]:
    from llama_adapter.llm.weights.adapter import check_fits

    parts = [
        f"{adapter.num_queries} queries in each of {adapter.num_adapter_layers} layers",
        f"for a LLaMA of width {adapter.dim}",
        "with LoRA" if adapter.has_lora else "without LoRA",
        "with biases" if any(name.endswith(".bias") for name in adapter.llama) else "without biases",
    ]
    if adapter.clip:
        parts.append("with a CLIP of its own, which is used")
    yield ok("adapter", f"The adapter has {', '.join(parts)}")
    tensors = {**adapter.llama, **adapter.visual, "adapter_query.weight": adapter.queries}  # CLIP is looked at as CLIP
    yield from _check_finite("adapter", adapter.name, iter(tensors.items()))
    gates = [tensor for name, tensor in adapter.llama.items() if name.endswith("attention.gate")]
    if gates and not any(bool(gate.count_nonzero()) for gate in gates):
        yield Finding(
            level="warning",
            what="adapter",
            sentence=f"All gates of `{adapter.name}` are zero, so pictures have no influence on the answers",
            hint="this is an adapter before its training",
        )
    if llama is None:
        return
    report = Report()
    report.attempt(
        "adapter",
        lambda: check_fits(
            adapter,
            llama=llama.name,
            vocab_size=llama.vocab_size,
            dim=llama.dim,
            num_layers=llama.num_layers,
            num_heads=llama.num_heads,
            ffn_dim=llama.ffn_dim,
        ),
    )
    faults = report.take()
    yield from faults or [
        ok("adapter", f"All {len(tensors) + len(adapter.clip)} tensors of the adapter are known and fit this LLaMA")
    ]


def _describe_clip(clip: "ClipSource") -> Iterator[Finding]:
    config = clip.config
    yield ok(
        "clip",
        f"CLIP with patches of {config.patch_size}, pictures of {config.image_size}, width {config.width}, "
        f"{config.num_layers} layers, features of width {config.output_dim}; no tensor is missing or unknown",
    )
    yield from _check_finite("clip", clip.name, iter(clip.tensors.items()))


def _check_vision(
    adapter: "AdapterFile", clip: "ClipSource | None", sources: "ModelSources", *, encoder: "EncoderCard | None"
) -> Iterator[Finding]:
    import torch

    from llama_adapter.app.models.checkpoints import resolve_channel_order
    from llama_adapter.vision.weights import build_vision, read_query

    report = Report()
    heads = sources.visual_heads
    if heads is None and encoder is not None:
        heads = encoder.vision.query.num_heads
    if clip is None and (sources.clip is not None or encoder is not None):
        # That fault was told, or CLIP is in the encoder; what can be seen without CLIP still counts.
        read = report.attempt("vision", lambda: read_query(adapter.visual, name=adapter.name, visual_heads=heads))
        yield from report.take()
        if read is not None and sources.clip is None:
            yield ok("vision", "The visual blocks are complete; CLIP is taken from the exported encoder")
        return
    order, _ = resolve_channel_order(sources.channel_order, adapter)
    built = report.attempt(
        "vision",
        lambda: build_vision(
            adapter.visual,
            name=adapter.name,
            clip=clip,
            visual_heads=heads,
            channel_order=order,
            dtype=torch.float16,
        ),
    )
    yield from report.take()
    if built is not None:
        query = built[0].query
        yield ok(
            "vision",
            f"The visual blocks fit this CLIP: width {query.width}, depth {query.depth}, {query.num_heads} heads, "
            f"channel order {order}",
        )


def _swapped(*, adapter: str | os.PathLike[str], clip: str | os.PathLike[str]) -> Iterator[Finding]:
    from llama_adapter.app.models.checkpoints import open_clip
    from llama_adapter.llm.weights.adapter import open_adapter

    report = Report()
    as_clip = report.attempt("clip", lambda: open_clip(adapter))
    as_adapter = report.attempt("adapter", lambda: open_adapter(clip))
    if as_clip is not None and as_adapter is not None:
        yield Finding(
            level="error",
            what="files",
            sentence=f"Adapter and CLIP are swapped: `{adapter}` is a CLIP and `{clip}` a LLaMA-Adapter file",
            hint=f"pass --adapter {clip} --clip {adapter}",
        )


def _check_claimed_digest(adapter: "AdapterFile") -> Iterator[Finding]:
    """A release's file name carries its digest; here it is computed."""
    from llama_adapter.app.models.checkpoints import RELEASED_ADAPTERS, claimed_digest, file_digest

    claimed = claimed_digest(adapter.name)
    if claimed is None:
        return
    actual = file_digest(adapter.name)
    if actual != claimed:
        yield Finding(
            level="error",
            what="adapter",
            sentence=f"`{adapter.name}` has the SHA-256 {actual}, and its name promises another one",
            hint="the download is damaged or the file was changed; fetch it again",
        )
    else:
        known = RELEASED_ADAPTERS.get(claimed)
        kind = f"is the public release {known}" if known else "is no public release known here"
        yield ok("adapter", f"The adapter's SHA-256 is the one in its file name; it {kind}")


def _check_listed_digests(place: "LlamaFolder") -> Iterator[Finding]:
    """Meta ships MD5 sums beside its weights. Only files beside the checklist are read, each once."""
    from llama_adapter.app.models.bundle import is_bare
    from llama_adapter.runtime.text import shown_excerpt, shown_name

    listed: dict[Path, str] = {}
    checklists = [place.folder / "checklist.chk"]
    if place.tokenizer is not None:
        checklists.append(place.tokenizer.parent / "tokenizer_checklist.chk")
    for checklist in checklists:
        if checklist.is_file():
            for line in checklist.read_text(encoding="utf-8", errors="replace").splitlines():
                digest, _, name = line.strip().partition(" ")
                name = name.strip().lstrip("*")
                if not name:  # an empty line
                    continue
                if is_bare(name):
                    listed[checklist.parent / name] = digest.lower()
                else:
                    yield Finding(
                        level="error",
                        what="llama",
                        sentence=f"`{shown_name(checklist)}` lists `{shown_excerpt(name)}`, which is not the name of a "
                        "file beside it",
                        hint="the checklist is damaged or another program's; copy it again",
                    )
    for path, digest in listed.items():
        if not path.is_file():
            yield Finding(
                level="error",
                what="llama",
                sentence=f"`{path.name}` is listed in the checklist of `{shown_name(path.parent)}` and is not there",
                hint="copy the missing file",
            )
            continue
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if actual == digest:
            yield ok("llama", f"`{path.name}` has the MD5 sum that its checklist names")
        else:
            yield Finding(
                level="error",
                what="llama",
                sentence=f"`{shown_name(path)}` has the MD5 sum {actual}, and its checklist names "
                f"{shown_excerpt(digest)}",
                hint="the file is damaged or another model's; copy it again",
            )


def _diagnose_bundle(place: Path, precision: "Precision | None") -> Iterator[Finding]:
    from llama_adapter.app.models.bundle import read_configs, read_manifest

    report = Report()
    manifest = report.attempt("manifest", lambda: read_manifest(place))
    if manifest is None:
        yield from report.take()
        return
    yield ok("manifest", f"The bundle holds the model {manifest['name']!r} in {_told_numbers(manifest)}")
    faults = [finding for finding in _check_files(place, manifest) if finding.level == "error"]
    if not faults:
        yield ok("files", f"All {len(manifest['files'])} files have the sizes and digests of the manifest")
    yield from faults
    configs = report.attempt("manifest", lambda: read_configs(place, manifest))
    yield from report.take()
    if configs is None:
        return
    tensor_faults = []
    for finding in _check_states(place, manifest, configs):
        yield finding
        tensor_faults += [finding] if finding.level == "error" else []
    if not faults and not tensor_faults:
        yield from _check_known_answer(place, precision)


def _told_numbers(manifest: Mapping[str, Any]) -> str:
    """Such as: float16; or: int8 and float16, made from the model 44061ead6302."""
    from llama_adapter.app.models.bundle import stored_precision

    if stored_precision(manifest) == "float":
        return str(manifest["dtype"])
    return f"{manifest['precision']} and {manifest['dtype']}, made from the model {manifest['origin']['digest'][:12]}"


def _check_files(place: Path, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    from llama_adapter.app.models.bundle import model_digest
    from llama_adapter.app.models.checkpoints import file_digest
    from llama_adapter.runtime.text import shown_excerpt

    for name, entry in manifest["files"].items():
        path = place / name
        sentence = ""
        if not path.is_file():
            sentence = f"The bundle lacks `{name}`"
        elif path.stat().st_size != entry["bytes"]:
            sentence = f"`{name}` has {path.stat().st_size:,} bytes, where {entry['bytes']:,} are wanted"
        elif (actual := file_digest(path)) != entry["sha256"]:
            sentence = f"`{name}` has the SHA-256 {actual}, where {shown_excerpt(entry['sha256'])} is wanted"
        if sentence:
            yield Finding(level="error", what=name, sentence=sentence, hint="copy the whole folder again")
    if model_digest(manifest) != manifest["digest"]:
        yield Finding(
            level="error",
            what="manifest",
            sentence="The manifest's digest of the model is not that of its files and configuration",
            hint="the manifest was changed by hand; write the bundle again with `llama-adapter convert`",
        )


def _check_states(place: Path, manifest: Mapping[str, Any], configs: tuple[Any, Any]) -> Iterator[Finding]:
    from llama_adapter.app.models.bundle import LLM, TOKENIZER, VISION, read_half
    from llama_adapter.llm.tokenizer import Tokenizer

    report = Report()
    for name, config in zip((VISION, LLM), configs, strict=True):
        state = report.attempt(
            name,
            lambda name=name, config=config: read_half(place / name, config, manifest),  # type: ignore[misc]
        )
        yield from report.take()
        if state is not None:
            yield ok(name, f"`{name}` has its {len(state)} tensors, in the shapes of its configuration")
            yield from _check_finite(name, name, iter(state.items()))
            yield from _check_int8(name, state)
    tokenizer = report.attempt(TOKENIZER, lambda: Tokenizer.load(place / TOKENIZER))
    yield from report.take()
    vocab_size = configs[1].vocab_size
    if tokenizer is not None and tokenizer.vocab_size != vocab_size:
        yield Finding(
            level="error",
            what=TOKENIZER,
            sentence=f"The tokenizer has {tokenizer.vocab_size} pieces, and the model has {vocab_size} tokens",
            hint="another model's tokenizer was copied into the bundle",
        )


def _check_known_answer(place: Path, precision: "Precision | None") -> Iterator[Finding]:
    from llama_adapter.app.captioning.captioner import Captioner
    from llama_adapter.app.models.bundle import KNOWN_ANSWER, is_bare, read_manifest, stored_precision
    from llama_adapter.app.reading.isolated import open_reader
    from llama_adapter.runtime.tensor_files.files import read_json

    if not (place / KNOWN_ANSWER).is_file():
        sentence = "The bundle carries no known answer, so its files were checked and the model was not run"
        yield Finding(level="not tried", what="known answer", sentence=sentence)
        return
    report = Report()
    known = report.attempt("known answer", lambda: read_json(place / KNOWN_ANSWER))
    yield from report.take()
    if known is None:
        return
    if not all(isinstance(known.get(key), str) for key in ("prompt", "text", "picture")) or not is_bare(
        known["picture"]
    ):
        yield Finding(
            level="error",
            what="known answer",
            sentence=f"`{KNOWN_ANSWER}` lacks a prompt, a text or a picture of this folder",
            hint="write the bundle again with `llama-adapter convert`",
        )
        return
    prompt = known["prompt"] if known.get("input") is None else (known["prompt"], known["input"])
    options = {"max_new_tokens": known["max_new_tokens"]} if "max_new_tokens" in known else {}
    try:
        with (
            Captioner.load(place, precision=precision) as captioner,
            closing(open_reader("process", captioner.spec, size=captioner.image_size)) as captioner.reader,
        ):
            [answer] = captioner.generate([place / known["picture"]], [prompt], temperature=0.0, **options)
    except Exception as error:  # whatever the model or its known answer made it stumble over is what was sought
        yield Finding(
            level="error",
            what="known answer",
            sentence=f"The known answer cannot be replayed: {str(error) or type(error).__name__}",
            hint=getattr(error, "hint", ""),
        )
        return
    if answer.error is not None:
        yield Finding(level="error", what="known answer", sentence=answer.error.message)
    elif answer.text == known["text"]:
        numbers = " with 8-bit weights" if captioner.info.precision == "int8" else ""
        yield ok("known answer", f"The model answers {answer.text!r} about its own picture{numbers}, as it should")
    elif "int8" in (captioner.info.precision, stored_precision(read_manifest(place))):  # widened, they stay rounded
        yield Finding(
            level="warning",
            what="known answer",
            sentence=f"With 8-bit weights the model answers {answer.text!r} about its own picture, and with full ones "
            f"{known['text'][:500]!r}",
            hint="rounding may change a word; where it changes the sense, use --precision float with the full bundle",
        )
    else:
        yield Finding(
            level="error",
            what="known answer",
            sentence=f"The model answers {answer.text!r} about its own picture, and should answer "
            f"{known['text'][:500]!r}",
            hint="files and digests are right, so the computation is wrong; please report it with this output",
        )


def _check_int8(name: str, state: "Mapping[str, Tensor]") -> Iterator[Finding]:
    """Weights are in -127..127: kernels may take the absolute of one, and -128 has none in 8 bits."""
    from llama_adapter.app.models.quantising import LARGEST, SCALE
    from llama_adapter.runtime.tensor_files.files import list_keys

    broken = [key for key, tensor in state.items() if key + SCALE in state and int(tensor.min()) < -LARGEST]
    if broken:
        sentence = f"`{name}` has 8-bit weights of -128, in {list_keys(broken)}"
        hint = "another program wrote the file; make the bundle with `llama-adapter quantize`"
        yield Finding(level="error", what=name, sentence=sentence, hint=hint)


def _check_finite(what: str, name: str, tensors: "Iterator[tuple[str, Tensor]]") -> Iterator[Finding]:
    from llama_adapter.runtime.tensor_files.files import list_keys

    broken = [key for key, tensor in tensors if not bool(tensor.isfinite().all())]
    if broken:
        yield Finding(
            level="error",
            what=what,
            sentence=f"`{name}` has numbers that are infinite or none at all, in {list_keys(broken)}",
            hint="the file is damaged, or its training had diverged; fetch it again",
        )
