"""A model -> a folder of MindIR graphs, in the form that users of MindSpore Lite have."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import yaml

from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.llm.exported.mindir_graphs import MindirDecoder
from llama_adapter.llm.exported.weights_file import Stored, WeightsFile
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.graphs.card import GraphDtype, Port, fingerprint
from llama_adapter.runtime.graphs.ge_config import recommended_ge_config
from llama_adapter.runtime.graphs.mindir import External, import_mindspore, weights_header, write_mindir
from llama_adapter.runtime.graphs.sidecar import file_sha256
from llama_adapter.runtime.operators import rotary_table
from llama_adapter.vision.card import INPUT, OUTPUT, EncoderCard
from llama_adapter.vision.encoder import encoder_from_state
from llama_adapter.vision.inference import FoldedPatches

CARD: Final = "decoder.json"
GE_CONFIG: Final = "config.ini"
PREFILL, INCREMENT = "{}_prefill_graph.mindir", "{}_inc_graph.mindir"
# In the folder of the weights, because MindSpore Lite takes two graphs at most for a model's own.
VARIABLES, PREFIX, ENCODER = "{}_variables", "prefix_graph.mindir", "encoder_graph.mindir"
_DECODER_WEIGHTS, _ENCODER_WEIGHTS = "data_0", "data_1"
FORMAT_VERSION: Final = 1


def export_mindir(
    model: LoadedModel,
    folder: str | os.PathLike[str],
    *,
    name: str | None = None,
    dtype: GraphDtype = "float32",
    has_sampling: bool = False,
    is_a2: bool = True,
    force: bool = False,
) -> Path:
    """Write a model as MindIR graphs over its weights; returns the folder, which appears complete or not at all.

    Parameters:
        folder: `<name>_prefill_graph.mindir`, `<name>_inc_graph.mindir`, `<name>_variables` with the weights and the
            graphs of prefix and encoder, `<name>.yaml`, `config.ini`, `tokenizer.model` and `decoder.json`.
        name: of the files. Default: the model's.
        dtype: of weights and cache; 8-bit weights are written as such numbers.
        has_sampling: whether the graphs draw tokens themselves (`is_sample_acceleration`).
        is_a2: whether `config.ini` has the options for an Atlas 800T A2, else those for an Atlas 800.
        force: replace an existing export.

    Raises GraphError without MindSpore and for weights that `dtype` cannot hold, UsageError if the folder exists.
    """
    import_mindspore()
    target = Path(folder).resolve()
    if target.exists() and not force:
        raise UsageError(f"`{folder}` exists already", hint="replace it with --force, or name another folder as --out")
    if target.exists() and not (target / CARD).is_file():
        raise UsageError(f"`{folder}` is no exported decoder, and is not replaced", hint="name another folder as --out")
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", name or model.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        (partial / VARIABLES.format(stem)).mkdir()
        _write_decoder(model, partial, stem=stem, dtype=dtype, has_sampling=has_sampling)
        has_encoder = bool(model.vision_state)
        if has_encoder:
            _write_encoder(model, partial / VARIABLES.format(stem), dtype=dtype)
        _write_texts(model, partial, stem=stem, has_sampling=has_sampling, is_a2=is_a2)
        (partial / "tokenizer.model").write_bytes(model.tokenizer.data)
        _write_card(model, partial, stem=stem, dtype=dtype, has_sampling=has_sampling)
        partial.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _write_decoder(model: LoadedModel, folder: Path, *, stem: str, dtype: GraphDtype, has_sampling: bool) -> None:
    config = model.decoder_config
    weights_file = f"{VARIABLES.format(stem)}/{_DECODER_WEIGHTS}"
    weights = _write_weights(folder / weights_file, model.decoder_state.items(), dtype=dtype)
    with (folder / weights_file).open("ab") as file:
        rest = WeightsFile(file, precision="float32")  # rotary tables are float32 in every model
        cos, sin = rotary_table(config.head_dim, num_positions=config.context, theta=config.rope_theta)
        rest.write([("rotary_cos", cos), ("rotary_sin", sin)], linears=())
    decoder = MindirDecoder(
        config=config, dtype=dtype, weights=weights | rest.tensors, folder=folder, weights_file=weights_file
    )
    decoder.write_prefill(PREFILL.format(stem), has_sampling=has_sampling)
    decoder.write_increment(INCREMENT.format(stem), has_sampling=has_sampling)
    if config.num_adapter_layers:
        decoder.write_prefix(f"{VARIABLES.format(stem)}/{PREFIX}")


def _write_encoder(model: LoadedModel, folder: Path, *, dtype: GraphDtype) -> None:
    from llama_adapter.vision.mindspore_cells import Encoder

    config, state = model.vision_config, {key: tensor.float() for key, tensor in model.vision_state.items()}
    patches = FoldedPatches(encoder_from_state(config, state)).linear
    state.pop("clip.patch_embedding.weight")
    weights = _write_weights(folder / _ENCODER_WEIGHTS, state.items(), dtype=dtype)
    with (folder / _ENCODER_WEIGHTS).open("ab") as file:
        rest = WeightsFile(file, precision="float32")
        rest.write([("patches.weight", patches.weight), ("patches.bias", patches.bias)], linears=())
    side = config.clip.image_size
    card = EncoderCard(
        name=model.name, vision=config, dtype=dtype, opset=0, fingerprint=fingerprint(model.vision_state)
    )
    write_mindir(
        Encoder(config, getattr(import_mindspore(), dtype)),
        folder / ENCODER,
        inputs=[Port(name=INPUT, dtype=dtype, shape=(-1, side, side, 3))],
        outputs=[OUTPUT],
        weights={
            key: External(_ENCODER_WEIGHTS, stored.offset, stored.num_bytes)
            for key, stored in (weights | rest.tensors).items()
        },
        card=card.to_graph(),
    )


def _write_weights(path: Path, tensors: Any, *, dtype: GraphDtype) -> dict[str, Stored]:
    with path.open("xb") as file:
        file.write(weights_header())
        weights = WeightsFile(file, precision=dtype)
        weights.write(tensors, linears=())
    return weights.tensors | {key: linear.weight for key, linear in weights.linears.items()}


def _write_texts(model: LoadedModel, folder: Path, *, stem: str, has_sampling: bool, is_a2: bool) -> None:
    """`<name>.yaml` and `config.ini`. Paths are relative to the folder, so that it can be moved."""
    config = model.decoder_config
    settings = {
        "infer": {
            "prefill_model_path": PREFILL.format(stem),
            "increment_model_path": INCREMENT.format(stem),
            "infer_seq_length": config.context,
            "model_type": "mindir",
            "model_name": stem,
            "ge_config_path": GE_CONFIG,
        },
        "model": {
            "model_config": {
                "type": "LlamaConfig",
                "seq_length": config.context,
                "hidden_size": config.dim,
                "num_layers": config.num_layers,
                "num_heads": config.num_heads,
                "vocab_size": config.vocab_size,
                "intermediate_size": config.ffn_dim,
                "rms_norm_eps": config.norm_eps,
                "use_past": True,
                "is_sample_acceleration": has_sampling,
            }
        },
    }
    (folder / f"{stem}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    (folder / GE_CONFIG).write_text(recommended_ge_config(is_a2=is_a2), encoding="utf-8")


def _write_card(model: LoadedModel, folder: Path, *, stem: str, dtype: GraphDtype, has_sampling: bool) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    values = {
        "version": FORMAT_VERSION,
        "format": "mindir",
        "name": model.name,
        "stem": stem,
        "llm": model.decoder_config.to_dict(),
        "dtype": dtype,
        "has_sampling": has_sampling,
        "fingerprint": fingerprint(model.decoder_state),
        "vision_fingerprint": fingerprint(model.vision_state),
        "prompt": model.prompt,
        "files": {
            str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in files
        },
    }
    (folder / CARD).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
