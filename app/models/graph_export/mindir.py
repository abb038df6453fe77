"""Exports a model as MindIR graphs, in a folder with the layout that users of MindSpore Lite know."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from torch import Tensor

from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.exported.mindir_graphs import (
    ENCODER,
    INCREMENT,
    PREFILL,
    PREFIX,
    MindirDecoder,
    rotary_tables,
)
from llama_adapter.llm.exported.step import num_prefix_layers
from llama_adapter.llm.exported.weights_file import Stored, WeightsFile
from llama_adapter.runtime.graphs.card import GraphDtype, Port
from llama_adapter.runtime.graphs.ge_config import FILE as GE_CONFIG
from llama_adapter.runtime.graphs.ge_config import recommended_ge_config
from llama_adapter.runtime.graphs.mindir import External, import_mindspore, weights_header, write_mindir
from llama_adapter.vision.card import INPUT, OUTPUT, EncoderCard
from llama_adapter.vision.encoder import encoder_from_state
from llama_adapter.vision.pixels import folded

_VARIABLES: Final = "{}_variables"  # for weights and further graphs; MindSpore Lite allows two graphs outside
_DECODER_WEIGHTS, _ENCODER_WEIGHTS = "data_0", "data_1"


@dataclass(frozen=True, kw_only=True, slots=True)
class MindirExport:
    """The files that were written."""

    files: tuple[str, ...]
    graphs: Mapping[str, str]  # file by graph: prefill, increment, prefix, encoder


def export_mindir(
    model: LoadedModel,
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    *,
    dtype: GraphDtype = "float32",
    sampling: bool = True,
    encoder: bool = True,
) -> MindirExport:
    """Write a model as MindIR graphs, with its weights in separate files, into an existing folder.

    `tensors` are those of the decoder, which are read one by one. The files are `<model>_prefill_graph.mindir`,
    `<model>_inc_graph.mindir`, `<model>_variables` (a folder with the weights and the graphs of prefix and encoder),
    `<model>.yaml` and `config.ini`.

    Parameters:
        dtype: dtype of weights and cache; 8-bit weights are converted to it.
        sampling: whether the graphs draw tokens themselves (`is_sample_acceleration`).
        encoder: whether to write the picture encoder too.

    Raises GraphError without MindSpore, and for weights that `dtype` cannot hold.
    """
    config = model.decoder_config
    import_mindspore()
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", model.name)
    variables = _VARIABLES.format(stem)
    (folder / variables).mkdir()
    weights_file = f"{variables}/{_DECODER_WEIGHTS}"
    weights = _write_weights(folder / weights_file, tensors, dtype=dtype)
    # Rotary tables are float32 in every model, like normalisation.
    tables = ((key, torch.from_numpy(table)) for key, table in rotary_tables(config).items())
    weights |= _append_floats(folder / weights_file, tables)
    decoder = MindirDecoder(
        config=config,
        dtype=dtype,
        weights=weights,
        folder=folder,
        weights_file=weights_file,
        has_embeddings=model.picture_format is not None,
    )
    graphs = {PREFILL: f"{stem}_prefill_graph.mindir", INCREMENT: f"{stem}_inc_graph.mindir"}
    for kind in (PREFILL, INCREMENT):
        decoder.write_step(graphs[kind], has_cache=kind == INCREMENT, has_sampling=sampling)
    files = [weights_file, *graphs.values()]
    if num_prefix_layers(config):
        graphs[PREFIX] = f"{variables}/prefix_graph.mindir"
        decoder.write_prefix(graphs[PREFIX])
        files.append(graphs[PREFIX])
    if encoder:
        graphs[ENCODER] = f"{variables}/encoder_graph.mindir"
        _write_encoder(model, folder / graphs[ENCODER], dtype=dtype)
        files += [graphs[ENCODER], f"{variables}/{_ENCODER_WEIGHTS}"]
    (folder / f"{stem}.yaml").write_text(_settings(config, stem, graphs, sampling=sampling), encoding="utf-8")
    (folder / GE_CONFIG).write_text(recommended_ge_config(), encoding="utf-8")
    return MindirExport(files=tuple(files), graphs=graphs)


def settings_files(graphs: Mapping[str, Any]) -> set[str]:
    """Names of the settings files of these graphs."""
    stem = str(graphs.get(PREFILL, "")).removesuffix("_prefill_graph.mindir")
    return {f"{stem}.yaml", GE_CONFIG}


def _write_encoder(model: LoadedModel, path: Path, *, dtype: GraphDtype) -> None:
    from llama_adapter.vision.mindspore_cells import Encoder

    config, state = model.vision_config, {key: tensor.float() for key, tensor in model.vision_state.items()}
    embedding = encoder_from_state(config, state).clip.patch_embedding  # checks all names and shapes
    bias = None if embedding.bias is None else embedding.bias.numpy()
    weight_WF, shift_W = folded(embedding.weight.numpy(), bias, rule=config.clip, channel_order=config.channel_order)
    state = {key: tensor for key, tensor in state.items() if not key.startswith("clip.patch_embedding.")}
    weights = _write_weights(path.parent / _ENCODER_WEIGHTS, state.items(), dtype=dtype)
    patches = [("patches.weight", torch.from_numpy(weight_WF)), ("patches.bias", torch.from_numpy(shift_W))]
    weights |= _append_floats(path.parent / _ENCODER_WEIGHTS, patches)
    card = EncoderCard(name=model.name, vision=config, dtype=dtype, opset=0, fingerprint=dict(model.source.fingerprint))
    side = config.clip.image_size
    write_mindir(
        Encoder(config, getattr(import_mindspore(), dtype)),
        path,
        inputs=[Port(name=INPUT, dtype=dtype, shape=(-1, side, side, 3))],
        outputs=[OUTPUT],
        weights={key: External(_ENCODER_WEIGHTS, stored.offset, stored.num_bytes) for key, stored in weights.items()},
        card=card.to_graph(),
    )


def _write_weights(path: Path, tensors: Iterable[tuple[str, Tensor]], *, dtype: GraphDtype) -> dict[str, Stored]:
    with path.open("xb") as file:
        file.write(weights_header())
        weights = WeightsFile(file, precision=dtype)
        weights.write(tensors, linears=())
    return weights.tensors | {key: linear.weight for key, linear in weights.linears.items()}


def _append_floats(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Stored]:
    with path.open("ab") as file:
        weights = WeightsFile(file, precision="float32")
        weights.write(tensors, linears=())
    return weights.tensors


def _settings(config: DecoderConfig, stem: str, graphs: Mapping[str, str], *, sampling: bool) -> str:
    """A settings file in the format of MindFormers. Paths are relative to it, so that the folder can be moved."""
    values: dict[str, Any] = {
        "infer": {
            "prefill_model_path": graphs[PREFILL],
            "increment_model_path": graphs[INCREMENT],
            "infer_seq_length": config.context,
            "model_type": "mindir",
            "model_name": stem,
            "ge_config_path": GE_CONFIG,
        },
        "model": {
            "model_config": {
                **({"type": "LlamaConfig"} if config.is_first_llama else {}),
                "seq_length": config.context,
                "hidden_size": config.dim,
                "num_layers": config.num_layers,
                "num_heads": config.num_heads,
                **({"n_kv_heads": config.num_kv_heads} if config.group > 1 else {}),
                "vocab_size": config.vocab_size,
                "intermediate_size": config.ffn_dim,
                "rms_norm_eps": config.norm_eps,
                "use_past": True,
                "is_sample_acceleration": sampling,
            }
        },
    }
    text: str = yaml.safe_dump(values, sort_keys=False)
    return text
