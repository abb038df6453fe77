"""A digest of the weights that every rank has whole, to see whether ranks have loaded the same model."""

import hashlib

from torch import Tensor

from llama_adapter.llm.model.llama import LlamaAdapterDecoder


def weights_fingerprint(decoder: LlamaAdapterDecoder) -> str:
    """SHA-256 of all norms and of the adapter's queries, in hex."""
    digest = hashlib.sha256()
    for tensor in _whole(decoder):
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _whole(decoder: LlamaAdapterDecoder) -> list[Tensor]:
    norms = [norm.weight for layer in decoder.layers for norm in (layer.attention_norm, layer.feed_forward_norm)]  # type: ignore[union-attr]
    return [*norms, decoder.norm.weight, decoder.adapter.queries]  # type: ignore[list-item]
