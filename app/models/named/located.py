"""From names and addresses to paths: `--model bias-7b`, `--llama-dir hf:OWNER/NAME`, `--clip clip-vit-l-14`.

A file or folder of that name comes first, then a folder in LLAMA_ADAPTER_HOME, then the catalogue. A LLaMA may be given
as `model` too.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from llama_adapter.app.models.models_by_name import find_model, llama_settings, model_settings
from llama_adapter.app.models.named.catalogue import Kind, Part, find_part, find_parts, read_catalogue
from llama_adapter.app.models.named.getting import Consent, obtain
from llama_adapter.app.models.named.hub_source import SCHEME
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.settings.setting import meant

FIELDS: Final[Mapping[str, Kind]] = {"llama_dir": "llama", "adapter": "adapter", "clip": "clip"}
# Fields of a spec that decide which number format fits the memory.
_COMPUTING: Final = ("device", "dtype", "precision", "operators", "batch_size")


def located(
    values: Mapping[str, Any],
    *,
    consent: Consent = "no",
    tell: Callable[[str], None] = lambda line: None,
    from_checkpoints: bool = False,
) -> dict[str, Any]:
    """The fields of a spec among `values` that name weights, with paths in place of names; empty if none does.

    Parts without a field in `values` are left out: an encoder needs no LLaMA.

    The model of an adapter becomes a bundle in the user's cache. A LLaMA at an address is the bundle that `get` made of
    it, if there is one. With `from_checkpoints`, or if LoRA or ranks ask for it, both are the checkpoints themselves.
    What is missing is fetched with `consent`; `tell` gets lines on what is done. Raises UsageError,
    DownloadError and OSError.
    """
    found: dict[str, Any] = {}
    for field, kind in FIELDS.items():
        if isinstance(name := values.get(field), str) and (weights := find_weights(name, kind)) is not None:
            found[field] = str(obtain({kind: weights}, name=name, consent=consent, tell=tell)[kind])
            found |= _heads(find_part(kind, name), values)
    if not isinstance(name := values.get("model"), str):
        return found
    if (place := _place(name)) is not None:
        can_be_llama = "llama_dir" in values and values["llama_dir"] is None
        llama = llama_settings(place) if can_be_llama else None
        return found if llama is None else found | {"model": None} | llama
    is_plain = not (from_checkpoints or values.get("lora") or (values.get("tensor_parallel") or 1) > 1)
    computing = {field: values[field] for field in _COMPUTING if values.get(field) is not None}
    if name.startswith(SCHEME):
        folder = obtain({"model": Part.at(name, "llama")}, name=name, consent=consent, tell=tell)["model"]
        if is_plain:
            from llama_adapter.app.models.named.ready import ready_texts

            if (bundle := ready_texts(folder, CaptionerSpec(**computing), tell=tell, only_written=True)) is not None:
                return found | {"model": str(bundle)}
        return found | {"model": None} | model_settings(folder)
    parts = find_parts(name)
    if "llama" not in parts:
        return found

    def checkpoints() -> dict[str, Any]:
        wanted = {field: parts[kind] for field, kind in FIELDS.items() if kind in parts and field in values}
        paths = obtain(wanted, name=name, consent=consent, tell=tell)
        return {field: str(path) for field, path in paths.items()} | _heads(parts.get("adapter"), values)

    if "adapter" not in parts or not is_plain:
        return found | {"model": None} | checkpoints()
    from llama_adapter.app.models.named.ready import ready_bundle

    bundle = ready_bundle(parts, CaptionerSpec(**computing), obtain=checkpoints, tell=tell)
    return found | {"model": str(bundle)}


def located_spec(spec: CaptionerSpec) -> CaptionerSpec:
    """The spec with paths in place of names. Nothing is fetched: raises UsageError for missing weights."""
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    found = located(values)
    return dataclasses.replace(spec, **found) if found else spec


def find_weights(name: str, kind: Kind) -> Part | None:
    """The weights that a name or an address stands for; None for a path. Raises UsageError for a wrong address."""
    if Path(name).expanduser().exists():
        return None
    return Part.at(name, kind) if name.startswith(SCHEME) else find_part(kind, name)


def _heads(part: Part | None, values: Mapping[str, Any]) -> dict[str, int]:
    """The heads of the visual blocks of an adapter, if the catalogue has them and the user gave none."""
    heads = None if part is None or values.get("visual_heads") is not None else part.visual_heads
    return {} if heads is None else {"visual_heads": heads}


def is_named(name: str) -> bool:
    """Whether a model's name is an address of the Hub or in the catalogue, and no path."""
    return _place(name) is None and (name.startswith(SCHEME) or "llama" in find_parts(name))


def _place(name: str) -> Path | None:
    """The file or folder of a model's name, if there is one."""
    try:
        return find_model(name)
    except UsageError:
        return None


def parts_of(name: str) -> dict[str, Part]:
    """All weights that `get NAME` fetches, by kind. Raises UsageError if there is no such name or address."""
    if name.startswith(SCHEME):
        return {"model": Part.at(name, "adapter")}  # it need not be a LLaMA with a tokenizer
    parts = {str(kind): part for kind, part in find_parts(name).items()}
    if not parts:
        similar = meant(name.lower(), [one for entries in read_catalogue().values() for one in entries])
        raise UsageError(
            f"The catalogue has no model `{name}`",
            hint=(f"{similar}; " if similar else "")
            + "`llama-adapter get --list` lists its names; hf:OWNER/NAME is a repository of the Hugging Face Hub",
        )
    return parts
