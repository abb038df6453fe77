"""Digests with which ranks check that they have loaded the same model."""

import hashlib
from pathlib import Path
from typing import Final

from torch import Tensor

from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.past import PastKeyValues

_NUM_SAMPLES: Final = 512  # per file; with a LLaMA-7B in one file, every matrix has some samples
_SAMPLE_BYTES: Final = 4096


def fingerprints(decoder: LlamaAdapterDecoder, *, files: str, past: PastKeyValues | None) -> dict[str, str]:
    """Name for messages -> digest in hexadecimal, for everything that must be the same on all ranks.

    `files` is the result of `files_fingerprint`. Of the weights, the digest covers those that every rank has whole:
    norms and the adapter's queries.
    """
    digest = hashlib.sha256(files.encode())
    for tensor in _whole(decoder):
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return {"weights": digest.hexdigest(), "past keys and values": "" if past is None else past.digest}


def files_fingerprint(model: LoadedModel, spec: CaptionerSpec) -> str:
    """A digest in hexadecimal of a model's files, which is the same on all machines.

    A bundle has a digest already. For checkpoints, sizes and samples are read, because no rank reads whole files.
    Raises OSError.
    """
    if spec.llama_dir is None:
        return model.digest
    digest = hashlib.sha256(repr(model.merged).encode())
    for source in model.sources:
        if source.role in ("llama", "adapter", "lora"):
            digest.update(_samples(Path(source.path)))
    return digest.hexdigest()


def _samples(path: Path) -> bytes:
    """The size of a file, and samples at equal distances, as bytes."""
    size = path.stat().st_size
    samples = [size.to_bytes(8, "little")]
    with open(path, "rb", buffering=0) as file:
        for number in range(_NUM_SAMPLES):
            file.seek(number * size // _NUM_SAMPLES)
            samples.append(file.read(_SAMPLE_BYTES))
    return b"".join(samples)


def _whole(decoder: LlamaAdapterDecoder) -> list[Tensor]:
    norms = [norm.weight for layer in decoder.layers for norm in (layer.attention_norm, layer.feed_forward_norm)]  # type: ignore[union-attr]
    return [*norms, decoder.norm.weight, decoder.adapter.queries]  # type: ignore[list-item]
