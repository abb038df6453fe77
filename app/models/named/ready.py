"""Bundles of models by name: written once into the user's cache, in the number format that fits the memory."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_adapter.app.models.bundle import save_bundle
from llama_adapter.app.models.bundle_manifest import MANIFEST
from llama_adapter.app.models.llama_folder import base_name
from llama_adapter.app.models.named.catalogue import Kind, Part
from llama_adapter.app.models.named.getting import terms
from llama_adapter.app.models.number_formats import DtypeChoice, ModelSizes
from llama_adapter.app.models.packed_bundle import pack_model
from llama_adapter.app.models.plan import PlanJob, planned_model
from llama_adapter.app.models.sketch import sketch
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import stream_model
from llama_adapter.llm.weights.families import FAMILIES
from llama_adapter.runtime.devices import DTYPES, EAGER, Backend, open_backend
from llama_adapter.runtime.errors import TooLittleMemoryError
from llama_adapter.runtime.kernels.library import find_library
from llama_adapter.runtime.locking import awaited_lock
from llama_adapter.runtime.schemes import FLOAT, QUANTISED, Precision
from llama_adapter.runtime.schemes.scheme import dtype_name
from llama_adapter.runtime.tensor_files.arrays import read_json
from llama_adapter.runtime.tensor_files.gguf_names import is_gguf
from llama_adapter.runtime.user_cache import cache_folder

Obtain = Callable[[], Mapping[str, Any]]  # fetches what is missing; the checkpoint fields of a spec


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """A number format, and the memory that a model needs in it."""

    precision: Precision
    dtype: str
    bytes: int

    @property
    def name(self) -> str:
        """Its common name."""
        return self.dtype if self.precision == FLOAT else self.precision

    @property
    def need(self) -> str:
        """Its memory in words."""
        return f"{self.name} needs {self.bytes / 1e9:.1f} GB"


def ready_bundle(
    parts: Mapping[Kind, Part], spec: CaptionerSpec, *, obtain: Obtain, tell: Callable[[str], None]
) -> Path:
    """The bundle of an adapter of the catalogue, in the number format of `spec` or the best that fits the memory.

    `spec` says what computes it. A bundle that was written before and fits is taken. `obtain` is called if none was
    written, or if the sizes of the model are not known before. `tell` gets a line with the choice and its reason.
    Raises TooLittleMemoryError, the errors of `obtain` and of reading checkpoints, and OSError.
    """
    origin = json.dumps([dataclasses.asdict(part) for part in parts.values()])
    return _ready(parts["adapter"].name, origin, parts, spec, obtain=obtain, tell=tell)


def ready_texts(
    place: Path, spec: CaptionerSpec, *, tell: Callable[[str], None], only_written: bool = False
) -> Path | None:
    """As `ready_bundle`, for a LLaMA in the cache of the Hub, without adapter; None for a path of another kind.

    With `only_written`, None also if no bundle was written before.
    """
    config = place / "config.json"
    if not is_gguf(place) and not (config.is_file() and read_json(config).get("model_type") in FAMILIES):
        return None
    name, origin = base_name(place.parent if place.is_file() else place), str(place)  # the path names the commit
    if only_written and not any((cache_folder() / "models").glob(f"{name}-*-{_key(origin)}/{MANIFEST}")):
        return None
    return _ready(name, origin, {}, spec, obtain=lambda: {"llama_dir": str(place)}, tell=tell)


def _key(origin: str) -> str:
    return hashlib.sha256(origin.encode()).hexdigest()[:12]


def _ready(
    name: str,
    origin: str,
    parts: Mapping[Kind, Part],
    spec: CaptionerSpec,
    *,
    obtain: Obtain,
    tell: Callable[[str], None],
) -> Path:
    """The bundle `name` that is made of `origin`."""
    backend = open_backend(spec.device)
    folder = cache_folder() / "models"
    folder.mkdir(exist_ok=True)

    def place(numbers: Numbers) -> Path:
        return folder / f"{name}-{numbers.precision}-{numbers.dtype}-{_key(origin)}"

    tried = _candidates(_sizes(parts, obtain), spec, backend=backend)
    free = backend.free_bytes()
    fitting = [one for one in tried if free is None or one.bytes <= free]
    there = "" if free is None else f", and {free / 1e9:.1f} GB are free"
    if not fitting:
        raise TooLittleMemoryError(
            f"`{name}` does not fit into the memory of {backend.name}: {tried[-1].need}{there}",
            hint="close other programs, or pass --batch-size 1 and a smaller --precision",
        )
    chosen = next((one for one in fitting if (place(one) / MANIFEST).is_file()), fitting[0])
    why = (tried[0].need if chosen in (tried[0], fitting[0]) else "written before") + there
    target = place(chosen)
    if (target / MANIFEST).is_file():
        tell(f"{name} in {chosen.name}: {why}")
        return target
    sources = obtain()
    with awaited_lock(folder / f".{target.name}.lock", waits=lambda: tell(f"waiting for `{target.name}`")):
        if not (target / MANIFEST).is_file():
            tell(f"{name} in {chosen.name}: {why}. It is written once to {target}")
            _write(target, spec, sources, chosen, backend=backend)
    return target


def _sizes(parts: Mapping[Kind, Part], obtain: Obtain) -> ModelSizes:
    """The sizes of a model, from the catalogue, or from its files; the errors of reading these come from here."""
    size = parts["llama"].size if "llama" in parts else None
    job = PlanJob(spec=CaptionerSpec(), size=size) if size else PlanJob(spec=CaptionerSpec(**obtain()))
    found = planned_model(job, exported=False)
    weights = () if found.vision is None else sketch(found.vision).state_dict().values()
    num_weights = sum(tensor.numel() for tensor in weights)
    return ModelSizes(decoder=found.decoder, num_encoder_weights=num_weights, precision=FLOAT)


def _candidates(sizes: ModelSizes, spec: CaptionerSpec, *, backend: Backend) -> list[Numbers]:
    """The number formats to choose from, from the most to the least exact."""
    wanted: Precision | None = "int8" if spec.operators == "w8a8" else spec.precision
    usual: tuple[Precision, ...] = (
        FLOAT,
        *(one for one in QUANTISED if not backend.refusal(one, wanted=spec.operators)),
    )
    found = []
    for precision in usual if wanted is None else (wanted,):
        own = dataclasses.replace(sizes, precision=precision)
        choice = DtypeChoice(dataclasses.replace(spec, precision=precision), backend=backend, mode=EAGER)
        dtype = dtype_name(choice(own))
        found.append(Numbers(precision=precision, dtype=dtype, bytes=choice.needed_bytes(own, dtype)))
    return found


def _write(
    target: Path, spec: CaptionerSpec, sources: Mapping[str, Any], numbers: Numbers, *, backend: Backend
) -> None:
    dtype = DTYPES[numbers.dtype]
    checkpoints = CaptionerSpec(precision=numbers.precision, **sources)
    model, tensors = stream_model(checkpoints, dtype=dtype)
    library = find_library().library
    if library is not None and backend.packed_layout(numbers.precision, dtype, wanted=spec.operators) is not None:
        model, tensors = pack_model(model, tensors, library=library)
    model = dataclasses.replace(model, card=terms(sources.values()))
    save_bundle(target, model=model, decoder_tensors=tensors)
