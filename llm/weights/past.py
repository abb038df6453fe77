"""Files of past keys and values: PaddleNLP's `pre_caches.npy`, and prefix tuning of Hugging Face PEFT.

They number positions differently. In PaddleNLP, the prompt begins at position 0; in PEFT, it begins after the past. The
rotary embedding depends only on differences of positions, so a rotation of the keys converts one form to the other.
"""

# L layers, N heads of keys and values, C past tokens, H head size, h half of it

from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.rotary import Rotary
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import damaged, read_arrays, read_json, require_file
from llama_adapter.runtime.text import shown_excerpt

PRE_CACHES: Final = "pre_caches.npy"  # PaddleNLP: float (L, 2, N, C, H), keys and values, the prompt at position 0
_PEFT_CONFIG: Final = "adapter_config.json"
_PEFT_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
_PEFT_KEY: Final = "prompt_embeddings"  # (C, L * 2 * N * H)
_FORMS: Final = f"a `.npy` file of PaddleNLP, or a folder with `{PRE_CACHES}` or PEFT's `{_PEFT_CONFIG}`"


def read_past(path: Path, config: DecoderConfig) -> PastKeyValues:
    """Read a `.npy` file, a folder with `pre_caches.npy`, or the folder of a PEFT adapter.

    Raises CheckpointError for a missing or damaged file, for a file of another model, and for values that
    are not finite.
    """
    if not path.is_dir():
        return _read_npy(path, config)
    if (path / PRE_CACHES).exists():
        return _read_npy(path / PRE_CACHES, config)
    if (path / _PEFT_CONFIG).exists():
        return _read_peft(path, config)
    raise CheckpointError(f"`{path}` holds no past keys and values", hint=f"name {_FORMS}")


def write_pre_caches(file: BinaryIO, past: PastKeyValues, config: DecoderConfig) -> None:
    """Write a `.npy` file that PaddleNLP reads, in float32."""
    k_LNCH = _shifted(past.k_LNCH, -len(past), config)
    np.save(file, np.stack([k_LNCH, past.v_LNCH], axis=1))


def _shifted(k_LNCH: np.ndarray, positions: int, config: DecoderConfig) -> np.ndarray:
    """Keys in half-split order, rotated by `positions` further positions. Layers that do not rotate keep theirs.

    With rotary embeddings (Su et al., 2021), all positions can be shifted together.
    """
    half = config.head_dim // 2

    def frequencies(rotary: Rotary | None) -> np.ndarray:  # angles of one position, float64
        if rotary is None:
            return np.zeros(half)
        if rotary.is_plain:
            return np.asarray(rotary.theta ** (-np.arange(half) / half))
        return rotary.frequencies(config.head_dim, context=config.context)[0].astype(np.float64)

    layers = [frequencies(config.rotary_of(layer)) for layer in range(config.num_layers)]
    angles_L11h = positions * np.stack(layers)[:, None, None]
    cos, sin = np.cos(angles_L11h), np.sin(angles_L11h)
    first, second = k_LNCH[..., :half].astype(np.float64), k_LNCH[..., half:].astype(np.float64)
    rotated: np.ndarray = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(np.float32)


def _read_npy(path: Path, config: DecoderConfig) -> PastKeyValues:
    require_file(path)
    try:
        whole = np.lib.format.open_memmap(path, mode="r")  # reads no objects, and no more than the file has
    except Exception:  # numpy raises many types for a damaged header, such as TokenError and OverflowError
        raise damaged(path, "it is not a .npy file of numbers") from None
    if whole.dtype.kind != "f":
        raise CheckpointError(f"`{path}` does not hold an array of floats", hint=f"name {_FORMS}")
    wanted = config.num_layers, 2, config.num_kv_heads, config.head_dim
    if whole.ndim != 5 or (*whole.shape[:3], whole.shape[4]) != wanted:
        layers, pair, heads, width = wanted
        raise CheckpointError(
            f"`{path}` is of shape {whole.shape}, and this model needs ({layers}, {pair}, {heads}, tokens, {width})",
            hint="name the file that was tuned for this LLaMA",
        )
    with np.errstate(all="ignore"):  # numbers that are not finite are refused below
        k_LNCH, v_LNCH = (whole[:, part].astype(np.float32) for part in (0, 1))
        k_LNCH = _shifted(k_LNCH, k_LNCH.shape[2], config)
    return _checked(k_LNCH, v_LNCH, config, path=path)


def _read_peft(folder: Path, config: DecoderConfig) -> PastKeyValues:
    described = read_json(folder / _PEFT_CONFIG)
    if (kind := described.get("peft_type")) != "PREFIX_TUNING":
        raise CheckpointError(
            f"`{folder}` is a PEFT adapter of type {shown_excerpt(str(kind))}, and PREFIX_TUNING is wanted",
            hint="of PEFT's adapters, PREFIX_TUNING is read here, and LORA by --lora",
        )
    path = next((folder / name for name in _PEFT_WEIGHTS if (folder / name).exists()), folder / _PEFT_WEIGHTS[0])
    if path.suffix == ".bin":
        from llama_adapter.runtime.tensor_files.files import read_tensor_file  # torch reads it

        tensors = read_tensor_file(path).tensors
        arrays = {name: (one.float() if one.is_floating_point() else one).numpy() for name, one in tensors.items()}
    else:
        arrays = read_arrays(path)
    if _PEFT_KEY not in arrays:
        raise CheckpointError(f"`{path}` has no tensor `{_PEFT_KEY}`", hint="save the adapter again by save_pretrained")
    flat = arrays[_PEFT_KEY]
    width = config.num_layers * 2 * config.kv_dim
    if flat.ndim != 2 or flat.shape[1] != width or flat.dtype.kind != "f":
        raise CheckpointError(
            f"`{path}` holds prompt embeddings of shape {flat.shape} in {flat.dtype}, and this model needs floats "
            f"(tokens, {width})",
            hint="name the adapter that was tuned for this LLaMA",
        )
    with np.errstate(all="ignore"):  # numbers that are not finite are refused below
        floats = flat.astype(np.float32)
    parts = floats.reshape(len(flat), config.num_layers, 2, config.num_kv_heads, config.head_dim)
    k_LNCH, v_LNCH = (np.ascontiguousarray(parts[:, :, part].transpose(1, 2, 0, 3)) for part in (0, 1))
    return _checked(k_LNCH, v_LNCH, config, path=path)


def _checked(k_LNCH: np.ndarray, v_LNCH: np.ndarray, config: DecoderConfig, *, path: Path) -> PastKeyValues:
    num_past = k_LNCH.shape[2]
    if not num_past:
        raise CheckpointError(f"`{path}` holds no tokens", hint="leave it out")
    if num_past >= config.context:
        raise CheckpointError(
            f"`{path}` holds {num_past} tokens, and the context of {config.context} has no room for a prompt",
            hint=f"pass a --context above {num_past}",
        )
    if not (np.isfinite(k_LNCH).all() and np.isfinite(v_LNCH).all()):
        raise CheckpointError(f"`{path}` holds values that are not finite", hint="tune it again, or copy it again")
    return PastKeyValues(np.ascontiguousarray(k_LNCH), np.ascontiguousarray(v_LNCH))
