"""Reading tensor files from disk as memory-mapped tensors, with damage and foreign files told in sentences.

No tensor names here: what the tensors mean is decided by the modules beside this one.
"""

import argparse
import json
import pickle
import re
import stat
import sys
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llm.errors import CheckpointError

_SHOWN_KEYS = 12
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_torch_file(path: Path) -> dict[str, Any]:
    """Read a file written by `torch.save`, memory-mapped where its format allows, on the CPU.

    Only tensors, plain values and `argparse.Namespace` (which the adapter's trainer stores) are accepted. Raises
    CheckpointError for a missing, damaged or foreign file.
    """
    require_file(path)
    if _is_torchscript(path):
        raise CheckpointError(
            f"`{path}` is a TorchScript archive, as OpenAI publishes CLIP, where LLaMA or adapter weights are wanted",
            hint="if it is CLIP, pass it as --clip",
        )
    try:
        content = _load(path)
    except pickle.UnpicklingError as error:
        forbidden = re.search(r"GLOBAL ([\w.]+)", str(error))  # the word of pickles for a class or function
        if forbidden:
            raise CheckpointError(
                f"`{path}` holds Python objects beside its tensors (`{forbidden[1]}`), so it is not opened: "
                "loading it would run code from the file",
                hint="ask for the file's tensors alone, saved by `torch.save` as a dictionary, or as safetensors",
            ) from None
        raise _damaged(path) from None
    except Exception:  # torch reports damage by a dozen types, from EOFError to KeyError
        raise _damaged(path) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` holds a {type(content).__name__}, where a dictionary of tensors is wanted")
    return content


def _is_torchscript(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/code/__torch__" in name for name in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def _load(path: Path) -> Any:
    # The trainer's checkpoints keep their command line as a Namespace: attributes only, no code.
    with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # foreign pickles are told by `read_torch_file`, in a sentence
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file as memory-mapped tensors on the CPU.

    Raises CheckpointError for a missing, damaged or foreign file.
    """
    require_file(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dictionary)
    except (SafetensorError, OSError, ValueError, RuntimeError):
        raise _damaged(path) from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises CheckpointError if the file is missing or holds something else."""
    require_file(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"`{path}` is no JSON: {error}", hint="the file is damaged; copy it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` holds a {type(content).__name__}, where a JSON object is wanted")
    return content


def require_file(path: Path) -> None:
    """Raise CheckpointError unless `path` is a regular file with something in it that is not a Git LFS pointer."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"The path {str(path)!r} is not UTF-8, so torch and safetensors cannot open it", hint="rename the folder"
        ) from None
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
            raise CheckpointError(f"`{path}` is {kind}, where a file is wanted")
        with path.open("rb") as file:
            head = file.read(24)
    except FileNotFoundError:
        raise CheckpointError(f"There is no file `{path}`") from None
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error.strerror}") from None
    if not head:
        raise CheckpointError(f"`{path}` is empty", hint="the download failed; fetch it again")
    if head == b"version https://git-lfs.":
        raise CheckpointError(
            f"`{path}` is a Git LFS pointer, not the file itself", hint="fetch it with `git lfs pull`"
        )


def only_tensors(content: Mapping[str, Any], *, path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict; raises CheckpointError if something else is in it."""
    others = [str(key) for key, value in content.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
    if others:
        raise CheckpointError(f"`{path}` is no plain dictionary of tensors; it also holds {list_keys(others)}")
    return dict(content)


def check_dense(tensors: Mapping[str, Tensor], *, path: Path) -> None:
    """Raise CheckpointError unless all tensors hold plain floating-point numbers: not sparse, quantised or absent."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in _FLOATING:
            kind = f"{tensor.layout}, {tensor.dtype} on {tensor.device}".replace("torch.", "")
            raise CheckpointError(
                f"`{path}` holds `{name}` as a tensor of another kind ({kind}), where dense floating-point numbers "
                "are wanted",
                hint="take the original file, before quantisation or other conversions",
            )


def require_numbers(
    content: Mapping[str, Any], *, path: Path, whole: Sequence[str], real: Sequence[str], hint: str
) -> None:
    """Raise CheckpointError unless the entries `whole` are whole numbers and `real` finite ones, all above 0."""
    wrong = [name for name in whole if type(content.get(name)) is not int or content[name] < 1]
    for name in real:
        if type(content.get(name)) not in (int, float) or not 0 < content[name] <= sys.float_info.max:
            wrong.append(name)
    if wrong:
        raise CheckpointError(f"`{path}` has no number, or an impossible one, for {list_keys(wrong)}", hint=hint)


def list_keys(keys: list[str]) -> str:
    """The first dozen keys for a message, and how many more there are."""
    shown = ", ".join(f"`{key}`" for key in keys[:_SHOWN_KEYS])
    rest = len(keys) - _SHOWN_KEYS
    return f"{shown} and {rest} more" if rest > 0 else shown


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"`{path}` ({path.stat().st_size:,} bytes) cannot be opened: it is cut short, damaged, or no tensor file",
        hint="compare its size with the place it came from, and copy it again",
    )
