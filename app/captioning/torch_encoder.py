"""The picture half of a model in torch, beside an exported decoder of the same model."""

import torch

from llama_adapter.app.captioning.assemble import load_model
from llama_adapter.app.models.encoders import has_clip
from llama_adapter.app.models.exported_model import ExportedModel, check_fingerprint
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.graphs.card import fingerprint
from llama_adapter.vision.backends.native import NativeEncoder
from llama_adapter.vision.backends.torch import TorchVisionBackend
from llama_adapter.vision.encoder import encoder_from_state
from llama_adapter.vision.inference import HostEncoder


def open_torch_encoder(spec: CaptionerSpec, exported: ExportedModel) -> TorchVisionBackend:
    """The encoder of the model that `spec` names. Raises CheckpointError without CLIP, GraphError for another model."""
    model = load_model(spec, dtype=torch.float32)
    model.decoder_state.clear()
    if not has_clip(model):
        raise CheckpointError(f"`{model.name}` has no CLIP", hint="name its file as --clip")
    own = fingerprint(model.vision_state) if model.origin is None else model.origin.fingerprint
    check_fingerprint(own, exported, what=f"The model `{model.name}`", name=model.name)
    backend = open_backend("cpu")
    vision = TorchVisionBackend(encoder_from_state(model.vision_config, model.vision_state), device=backend.device)
    backend.prepare(vision.module, wanted=spec.operators)
    if backend.kernels is not None and isinstance(vision.module, HostEncoder):
        vision.module = NativeEncoder(vision.module, library=backend.kernels)
    return vision
