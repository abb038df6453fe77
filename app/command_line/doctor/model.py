"""Checks a model before use, tensor by tensor, and describes faults in sentences."""

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.command_line.doctor.findings import Finding, Report
from llama_adapter.app.models.bundle import add_known_answer
from llama_adapter.app.models.bundle_manifest import (
    KNOWN_ANSWER,
    VISION,
    Manifest,
    decoder_file,
    is_bare,
    read_manifest,
)
from llama_adapter.app.models.bundle_tensors import Stored, read_decoder, read_vision
from llama_adapter.app.models.checkpoints import (
    RELEASED_ADAPTERS,
    claimed_digest,
    find_clip,
    lora_notes,
    merge_loras,
    open_clip,
    open_llama,
    query_heads,
    resolve_channel_order,
)
from llama_adapter.app.models.connected import open_connected
from llama_adapter.app.models.llama_folder import LlamaFolder, base_name, find_llama
from llama_adapter.app.models.models_by_name import LlamaForm, bundle_folder
from llama_adapter.app.models.replaced_folder import again_if_replaced
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.roofline import tower_flops
from llama_adapter.app.models.sketch import HalfConfig
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import stream_merged_bundle
from llama_adapter.app.pictures.reading.isolated import open_reader
from llama_adapter.llm.pieces.folder import stored_name
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.llm.weights.adapter import AdapterFile, open_adapter
from llama_adapter.llm.weights.build import plan_decoder
from llama_adapter.llm.weights.foreign import count_weights, read_foreign
from llama_adapter.llm.weights.huggingface import weight_files
from llama_adapter.llm.weights.names import LlamaSource
from llama_adapter.runtime.digests import file_digest
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.kernels.layout import PackedLayout
from llama_adapter.runtime.kernels.library import find_library
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.schemes.scheme import find_scheme
from llama_adapter.runtime.tensor_files.arrays import list_keys, read_json
from llama_adapter.runtime.tensor_files.files import read_tensor_file
from llama_adapter.runtime.text import shown_excerpt, shown_name
from llama_adapter.vision.card import EncoderCard
from llama_adapter.vision.towers import ClipSource
from llama_adapter.vision.weights import build_vision, read_query

KNOWN_PICTURE = "03-purple-triangle.png"  # losslessly compressed, so that every image decoder gives the same pixels
KNOWN_PROMPT = "Name three colours."
KNOWN_TOKENS = 16


def write_known_answer(place: Path) -> str:
    """Caption a sample picture with a bundle, and store the answer in it, for `diagnose` to check; returns the text.

    A model for texts answers `KNOWN_PROMPT`. Raises the errors of `Captioner.load`, and CheckpointError if the model
    gives no answer.
    """
    manifest = read_manifest(place)
    picture = sample_pictures() / KNOWN_PICTURE if manifest["vision"] else None
    with Captioner.load(place, batch_size=1, tensor_parallel=manifest.num_ranks) as captioner:
        if picture is None:
            [answer] = captioner.generate_text(KNOWN_PROMPT, max_new_tokens=KNOWN_TOKENS)
        else:
            answer = captioner.caption(picture, max_new_tokens=KNOWN_TOKENS)
        dtype = captioner.info.dtype
    if answer.error is not None:
        raise CheckpointError(answer.error.message)
    known = {"prompt": answer.prompt, "text": answer.text, "max_new_tokens": KNOWN_TOKENS, "dtype": dtype}
    add_known_answer(place, known_answer=known, picture=picture)
    return answer.text


def diagnose(spec: CaptionerSpec, *, exported: bool = False, encoder: EncoderCard | None = None) -> list[Finding]:
    """Check the model of a spec: a bundle and the LoRA to be merged into it, or the checkpoints for a bundle.

    With an `exported` encoder, CLIP may be missing; `encoder` is the encoder's card, if it has one. The question of a
    bundle's known answer is asked again on the spec's device in its precision, by default the bundle's own.

    After a failed check, later checks still run. Files are read completely and compared with their known digests.
    Faults of the model are returned as findings, never raised.
    """
    if spec.llama_dir is None:
        return _bundle_findings(bundle_folder(spec.model), spec)
    report = Report()
    _check_sources(report, spec, exported=exported, encoder=encoder)
    return report.findings


@again_if_replaced
def _bundle_findings(place: str | os.PathLike[str], spec: CaptionerSpec) -> list[Finding]:
    report, lora = Report(), spec.lora
    _check_bundle(report, Path(place), spec)
    if not lora or report.has_errors:
        return report.findings
    merged = report.attempt("lora", lambda: stream_merged_bundle(place, lora))
    if merged is not None:
        report.add("ok", "lora", f"All tensors of {len(lora)} LoRA folder(s) are known and fit this bundle")
        for note in merged[0].notes:
            report.add("warning", "model", note)
    return report.findings


def _check_sources(report: Report, spec: CaptionerSpec, *, exported: bool, encoder: EncoderCard | None) -> None:
    place = report.attempt("llama", lambda: find_llama(spec.llama_dir or "", llama_type=spec.llama_type))
    tokenizer = llama = sees_tokens = None
    if place is not None and spec.adapter is None and report.attempt("llama", lambda: place.is_foreign):
        return _check_foreign_folder(report, place)
    adapter, adapter_file = None, spec.adapter
    if place is not None:
        tokenizer = report.attempt("tokenizer", place.open_tokenizer)
        llama = report.attempt("llama", lambda: open_llama(place))
        if adapter_file is None:
            sees_tokens = report.attempt("vision", lambda: place.sees_tokens)
    if adapter_file is not None:
        adapter = report.attempt("adapter", lambda: open_adapter(adapter_file, for_texts=True))
    clip: ClipSource | None = None
    if adapter is not None and adapter.sees_pictures:
        clip = report.attempt("clip", lambda: find_clip(spec.clip, adapter, llama=place))
    elif adapter is None and adapter_file is not None and spec.clip is not None:
        clip = report.attempt("clip", lambda: open_clip(spec.clip or ""))
        if clip is None:
            _check_swapped(report, adapter=adapter_file, clip=spec.clip)
    if llama is not None and spec.lora:
        merged = report.attempt("lora", partial(merge_loras, spec.lora, llama, adapter))
        loras = merged[1] if merged else ()
        for lora in loras:
            sentence = f"All tensors of the LoRA `{lora.path}` are known and fit this LLaMA, weight {lora.weight:g}"
            report.add("ok", "lora", sentence)
        for note in lora_notes(loras, base=base_name(place.folder), tokenizer=tokenizer) if place is not None else ():
            report.add("warning", "model", note)
    if place is not None:
        _check_listed_digests(report, place)
    if tokenizer is not None:
        template = "" if tokenizer.settings.chat_template is None else " and a chat template"
        report.add("ok", "tokenizer", f"The tokenizer has {tokenizer.vocab_size} pieces{template}")
    if place is not None and llama is not None:
        _check_llama(report, llama, tokenizer, form=place.form)
        if sees_tokens and tokenizer is not None:
            _check_connected(report, place.folder, tokenizer, dim=llama.config.dim)
    if adapter is not None:
        _check_adapter(report, adapter, llama, vocab_size=None if tokenizer is None else tokenizer.vocab_size)
    if clip is not None:
        config = clip.config
        sizes = f"patches of {config.patch_size}, pictures of {config.image_size}, width {config.width}"
        sizes += f", {config.num_layers} layers, {config.num_features} features of width {config.output_dim}"
        num_weights = sum(tensor.numel() for tensor in clip.tensors.values())
        cost = f"{num_weights / 1e6:,.0f} million weights, {tower_flops(config) / 1e9:,.0f} GFLOP a picture"
        report.add("ok", "clip", f"CLIP with {sizes}: {cost}; no tensor is missing or unknown")
        _check_finite(report, "clip", clip.name, clip.tensors.items())
    if adapter is not None and adapter.sees_pictures:
        heads = query_heads(spec, adapter, exported=exported, encoder=encoder)
        _check_vision(report, adapter, clip, spec, exported=exported, heads=heads)


def _check_foreign_folder(report: Report, place: LlamaFolder) -> None:
    """Check a model that transformers runs. Whether all of its tensors are there is found out when it is loaded."""
    tokenizer = report.attempt("tokenizer", place.open_tokenizer)
    config = report.attempt("llama", lambda: read_foreign(place.folder))
    files = report.attempt("llama", lambda: weight_files(place.folder))
    if tokenizer is not None:
        report.add("ok", "tokenizer", f"The tokenizer has {tokenizer.vocab_size} pieces")
    if config is None or files is None:
        return
    contents = f"{count_weights(config):,} weights in {len(files)} file(s)"
    sentence = f"A model of type {config.model_type}, {contents}, which the package transformers runs, for texts only"
    report.add("ok", "llama", sentence)
    for file in files:
        tensors = report.attempt("llama", lambda file=file: read_tensor_file(file).tensors)  # type: ignore[misc]
        _check_finite(report, "llama", file.name, (tensors or {}).items())
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        sentence = f"The tokenizer has {tokenizer.vocab_size} pieces, and the model has {config.vocab_size} tokens"
        report.add("error", "tokenizer", sentence, "copy the tokenizer of this model into its folder")


def _check_llama(report: Report, llama: LlamaSource, tokenizer: Tokenizer | None, *, form: LlamaForm) -> None:
    names = {"bundle": "a bundle's", "gguf": "GGUF's"}
    shown = names.get(form, "Hugging Face's" if llama.half_split else "Meta's")
    contents = f"{len(llama.files)} file(s), {len(llama.tensors)} tensors, none missing or unknown"
    config = llama.config
    heads = f"{config.num_heads} heads"
    if config.group > 1:
        heads += f" on {config.num_kv_heads} of keys and values"
    sizes = f"width {config.dim}, {config.num_layers} layers, {heads}, {config.vocab_size} tokens"
    report.add("ok", "llama", f"LLaMA in {shown} form, {contents}: {sizes}")
    _check_finite(report, "llama", llama.name, ((name, split.read()) for name, split in llama.tensors.items()))
    if tokenizer is not None:
        report.attempt("tokenizer", lambda: plan_decoder(llama, None, vocab_size=tokenizer.vocab_size))


def _check_connected(report: Report, folder: Path, tokenizer: Tokenizer, *, dim: int) -> None:
    found = report.attempt("vision", lambda: open_connected(folder, tokenizer, dim=dim))
    if found is None:
        return
    config, form = found.config.clip, found.format
    cut = f"; large pictures are cut into up to {form.most_squares} squares" if form.most_squares > 1 else ""
    tower = f"a tower of width {config.width} and {config.num_layers} layers for {config.image_size} pixels"
    sentence = f"Pictures are tokens: {tower} and a connector make {form.tokens_each} of `{form.token}`{cut}"
    report.add("ok", "vision", sentence)
    _check_finite(report, "vision", str(folder), found.tensors.items())


def _check_adapter(report: Report, adapter: AdapterFile, llama: LlamaSource | None, *, vocab_size: int | None) -> None:
    queries = f"{adapter.num_queries} queries in each of {adapter.num_adapter_layers} layers"
    parts = [
        "scales of the inputs of linear layers" if adapter.is_chat else queries,
        f"for a LLaMA of width {adapter.dim}",
        "with LoRA" if adapter.has_lora else "without LoRA",
        "with biases" if any(name.endswith((".bias", "_bias")) for name in adapter.llama) else "without biases",
    ]
    if not adapter.sees_pictures:
        parts.append("for chat (LLaMA-Adapter V2)" if adapter.is_chat else "for texts alone (LLaMA-Adapter V1)")
    if adapter.clip:
        parts.append("with a CLIP of its own, which is used")
    report.add("ok", "adapter", f"The adapter has {', '.join(parts)}")
    tensors = {**adapter.llama, **adapter.visual}  # CLIP is checked separately
    if not adapter.is_chat:
        tensors["adapter_query.weight"] = adapter.queries
    _check_finite(report, "adapter", adapter.name, tensors.items())
    gates = [tensor for name, tensor in adapter.llama.items() if name.endswith("attention.gate")]
    if not adapter.is_chat and gates and not any(bool(gate.count_nonzero()) for gate in gates):
        sentence = f"All gates of `{adapter.name}` are zero, so pictures have no influence on the answers"
        report.add("warning", "adapter", sentence, "this is an adapter before its training")
    most = 0 if llama is None else llama.config.vocab_size
    if llama is not None and report.passes(
        "adapter", lambda: plan_decoder(llama, adapter, vocab_size=min(vocab_size or most, most))
    ):
        num_tensors = len(tensors) + len(adapter.clip)
        report.add("ok", "adapter", f"All {num_tensors} tensors of the adapter are known and fit this LLaMA")
    claimed = claimed_digest(adapter.name)  # from the file name of a release
    if claimed is None:
        return
    if (actual := file_digest(adapter.name)) != claimed:
        sentence = f"`{adapter.name}` has the SHA-256 {actual}, and its name promises another one"
        report.add("error", "adapter", sentence, "the download is damaged or the file was changed; fetch it again")
    else:
        known = RELEASED_ADAPTERS.get(claimed)
        kind = f"is the public release {known}" if known else "is no public release known here"
        report.add("ok", "adapter", f"The adapter's SHA-256 is the one in its file name; it {kind}")


def _check_vision(
    report: Report,
    adapter: AdapterFile,
    clip: ClipSource | None,
    spec: CaptionerSpec,
    *,
    exported: bool,
    heads: int | None,
) -> None:
    if clip is None and (spec.clip is not None or exported):
        # CLIP's fault is reported already, or CLIP is in the exported encoder. The visual blocks are still checked.
        is_read = report.passes("vision", lambda: read_query(adapter.visual, name=adapter.name, visual_heads=heads))
        if is_read and spec.clip is None:
            report.add("ok", "vision", "The visual blocks are complete; CLIP is taken from the exported encoder")
        return
    order, _ = resolve_channel_order(spec.channel_order, adapter)
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
    if built is not None:
        query = built[0].query
        sizes = f"width {query.width}, depth {query.depth}, {query.num_heads} heads"
        report.add("ok", "vision", f"The visual blocks fit this CLIP: {sizes}, channel order {order}")


def _check_swapped(report: Report, *, adapter: str | os.PathLike[str], clip: str | os.PathLike[str]) -> None:
    unseen = Report()
    as_clip = unseen.passes("clip", lambda: open_clip(adapter))
    if as_clip and unseen.passes("adapter", lambda: open_adapter(clip)):
        sentence = f"Adapter and CLIP are swapped: `{adapter}` is a CLIP and `{clip}` a LLaMA-Adapter file"
        report.add("error", "files", sentence, f"pass --adapter {clip} --clip {adapter}")


def _check_listed_digests(report: Report, place: LlamaFolder) -> None:
    """Compare files with the MD5 sums that Meta ships with its weights. Only files next to the checklist are read."""
    listed: dict[Path, str] = {}
    checklists = [place.folder / "checklist.chk"]
    if place.tokenizer is not None:
        checklists.append(place.tokenizer.parent / "tokenizer_checklist.chk")
    for checklist in filter(Path.is_file, checklists):
        for line in checklist.read_text(encoding="utf-8", errors="replace").splitlines():
            digest, _, name = line.strip().partition(" ")
            name = name.strip().lstrip("*")
            if is_bare(name):
                listed[checklist.parent / name] = digest.lower()
            elif name:
                sentence = f"lists `{shown_excerpt(name)}`, which is not the name of a file beside it"
                hint = "the checklist is damaged or another program's; copy it again"
                report.add("error", "llama", f"`{shown_name(checklist)}` {sentence}", hint)
    for path, digest in listed.items():
        if not path.is_file():
            sentence = f"`{path.name}` is listed in the checklist of `{shown_name(path.parent)}` and is not there"
            report.add("error", "llama", sentence, "copy the missing file")
            continue
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if actual == digest:
            report.add("ok", "llama", f"`{path.name}` has the MD5 sum of its checklist")
        else:
            sentence = f"has the MD5 sum {actual}, and its checklist names {shown_excerpt(digest)}"
            hint = "the file is damaged or another model's; copy it again"
            report.add("error", "llama", f"`{shown_name(path)}` {sentence}", hint)


def _check_bundle(report: Report, place: Path, spec: CaptionerSpec) -> None:
    manifest = report.attempt("manifest", lambda: read_manifest(place))
    if manifest is None:
        return
    numbers = str(manifest["dtype"])
    layout = manifest.layout
    if (stored := manifest.precision) != FLOAT:
        origin = manifest["origin"]
        numbers = f"{stored} and {numbers}, made from the model {origin['digest'][:12]}"
        if num_pictures := origin.get("calibration_pictures"):
            numbers += f", calibrated with {num_pictures} pictures"
    if layout is not None:
        numbers += f", packed in {layout} from the bundle {manifest['packed']['source'][:12]}"
    ranks = manifest.num_ranks
    if ranks > 1:
        numbers += f", its decoder split for {ranks} ranks"
    report.add("ok", "manifest", f"The bundle holds the model {manifest['name']!r} in {numbers}")
    if layout is not None:
        _tell_packed(report, layout, manifest.precisions)
    _check_files(report, manifest)
    if not report.has_errors:
        report.add("ok", "files", f"All {len(manifest['files'])} files have the sizes and digests of the manifest")
    configs = report.attempt("manifest", manifest.configs)
    if configs is None:
        return
    vision, decoder = configs
    halves: list[tuple[str, HalfConfig, Callable[[], dict[str, Tensor]]]] = []
    if manifest["vision"]:
        halves.append((VISION, vision, partial(read_vision, manifest, vision)))
    for rank in range(ranks):
        read = partial(read_decoder, manifest, decoder, rank=rank)
        halves.append((decoder_file(rank, ranks), decoder.share(rank, ranks), read))
    for name, config, read_tensors in halves:
        state = report.attempt(name, read_tensors)
        if state is not None:
            report.add("ok", name, f"`{name}` has its {len(state)} tensors, in the shapes of its configuration")
            _check_finite(report, name, name, Stored(manifest).plain(state, config))
    name = stored_name(manifest["files"])
    tokenizer = report.attempt(name, lambda: Tokenizer.load_stored(place, manifest["files"]))
    vocab_size = decoder.vocab_size
    if tokenizer is not None and tokenizer.vocab_size != vocab_size:
        sentence = f"The tokenizer has {tokenizer.vocab_size} pieces, and the model has {vocab_size} tokens"
        report.add("error", name, sentence, "another model's tokenizer was copied into the bundle")
    if not report.has_errors:
        _check_known_answer(report, manifest, spec)


def _tell_packed(report: Report, layout: PackedLayout, precisions: frozenset[Precision]) -> None:
    """Report whether this processor uses the packed weights as they are."""
    found = find_library()
    if found.library is not None and layout.fits(found.library.layout, precisions):
        sentence = f"The kernels here ({found.library.instruction_set}) use its packed weights as they are"
        report.add("ok", "packed", sentence)
        return
    own = found.reason if found.library is None else f"{found.library.instruction_set} takes {found.library.layout}"
    sentence = f"The kernels here do not use its packed weights, which are laid out again at every start: {own}"
    report.add("ok", "packed", sentence, "`llama-adapter pack` on this processor makes a bundle that starts faster")


def _check_files(report: Report, manifest: Manifest) -> None:
    for name, entry in manifest["files"].items():
        has_size = report.passes(name, partial(manifest.check_sizes, name))
        if has_size and (actual := file_digest(manifest.place / name)) != entry["sha256"]:
            sentence = f"`{name}` has the SHA-256 {actual}, where {shown_excerpt(entry['sha256'])} is wanted"
            report.add("error", name, sentence, "copy the whole folder again")
    if manifest.model_digest() != manifest["digest"]:
        sentence = "The manifest's digest of the model is not that of its files and configuration"
        hint = "the manifest was changed by hand; write the bundle again with `llama-adapter convert`"
        report.add("error", "manifest", sentence, hint)


def _check_known_answer(report: Report, manifest: Manifest, spec: CaptionerSpec) -> None:
    place, what = manifest.place, "known answer"
    if not (place / KNOWN_ANSWER).is_file():
        sentence = "The bundle carries no known answer, so its files were checked and the model was not run"
        report.add("not tried", what, sentence)
        return
    known = report.attempt(what, lambda: read_json(place / KNOWN_ANSWER))
    if known is None:
        return
    keys = ("prompt", "text", "picture") if manifest["vision"] else ("prompt", "text")
    are_texts = all(isinstance(known.get(key), str) for key in keys)
    if not are_texts or not is_bare(known.get("picture", KNOWN_ANSWER)):
        sentence = f"`{KNOWN_ANSWER}` lacks a prompt, a text or a picture of this folder"
        report.add("error", what, sentence, "write the bundle again with `llama-adapter convert`")
        return
    prompt = known["prompt"] if known.get("input") is None else (known["prompt"], known["input"])
    options = {"max_new_tokens": known["max_new_tokens"]} if "max_new_tokens" in known else {}
    try:
        with (
            Captioner.load(
                place, precision=spec.precision, device=spec.device, tensor_parallel=manifest.num_ranks
            ) as captioner,
            closing(open_reader("process", captioner.spec.pictures, pixels=captioner.pixels)) as captioner.reader,
        ):
            options["temperature"] = 0.0
            if manifest["vision"]:
                [answer] = captioner.generate([place / known["picture"]], [prompt], **options)
            else:
                [answer] = captioner.generate_text(prompt, **options)
    except Exception as fault:  # any failure becomes the finding
        sentence = f"The known answer cannot be replayed: {str(fault) or type(fault).__name__}"
        report.add("error", what, sentence, getattr(fault, "hint", ""))
        return
    asked = "about its own picture" if manifest["vision"] else "to its own prompt"
    used, dtype, wanted = captioner.info.precision, captioner.info.dtype, f"{known['text'][:500]!r}"
    where, known_dtype = f"on {captioner.info.device} in {dtype}", shown_excerpt(str(known.get("dtype", "float32")))
    numbers = "" if used == FLOAT else f" with {find_scheme(used).title} weights"
    if answer.error is not None:
        report.add("error", what, answer.error.message)
    elif answer.text == known["text"]:
        report.add("ok", what, f"The model answers {answer.text!r} {asked} {where}{numbers}, as it should")
    # Also if quantised weights were dequantised: rounding errors remain.
    elif {used, manifest.precision} != {FLOAT} or {dtype, known_dtype} != {"float32"}:
        report.add(
            "warning",
            what,
            f"The model answers {answer.text!r} {asked} {where}{numbers}; with full weights in {known_dtype}, "
            f"it answered {wanted}",
            "rounding may change a word; where it changes the sense, compare with the full bundle, --precision float "
            "and --dtype float32",
        )
    else:
        sentence = f"The model answers {answer.text!r} {asked}, and should answer {wanted}"
        hint = "files and digests are right, so the computation is wrong; please report it with this output"
        report.add("error", what, sentence, hint)


def _check_finite(report: Report, what: str, name: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    broken = [key for key, tensor in tensors if not bool(tensor.isfinite().all())]
    if broken:
        sentence = f"`{name}` has numbers that are infinite or not numbers, in {list_keys(broken)}"
        report.add("error", what, sentence, "the file is damaged, or its training had diverged; fetch it again")
