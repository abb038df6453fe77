"""A model's picture encoder in torch, used with an exported decoder of the same model."""

import torch

from llama_adapter.app.models.encoders import has_clip
from llama_adapter.app.models.exported_model import ExportedModel, check_fingerprint
from llama_adapter.app.models.memory_fit import place_encoder
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import stream_model
from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.vision.backends.base import VisionBackend


def open_torch_encoder(spec: CaptionerSpec, exported: ExportedModel) -> VisionBackend:
    """Load the encoder of the model in `spec`. Raises CheckpointError without CLIP, GraphError for another model."""
    model, _ = stream_model(spec, dtype=torch.float32)
    if not has_clip(model):
        raise CheckpointError(f"`{model.name}` has no CLIP", hint="name its file as --clip")
    check_fingerprint(model.source.fingerprint, exported, what=f"The model `{model.name}`", name=model.name)
    backend = open_backend("cpu")
    return place_encoder(model.vision_config, model.vision_state, num_rows=1, operators=spec.operators, backend=backend)
