"""The exported encoder that a spec names: its files, identity, graph and execution provider. Imports no torch."""

import hashlib
from pathlib import Path

from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.runtime.device_names import om_device_id
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.onnx_provider import CPU, OnnxProvider, provider_of_device
from llama_adapter.runtime.graphs.open_session import GraphKind, GraphSpec
from llama_adapter.vision.config import ChannelOrder


def decoder_provider(spec: CaptionerSpec) -> OnnxProvider:
    """The execution provider of an ONNX decoder. Raises UsageError for options that the provider does not know."""
    device = "cpu" if spec.device == AUTO else spec.device
    return provider_of_device(device, options=spec.provider_option, config=spec.provider_config)


def encoder_provider(spec: CaptionerSpec) -> OnnxProvider:
    """The execution provider of an ONNX encoder. Raises UsageError for options that the provider does not know."""
    if spec.vision_kind != "onnx":
        return CPU
    device = "cpu" if spec.encoder_device is None else str(spec.encoder_device)
    return provider_of_device(device, options=spec.provider_option, config=spec.provider_config)


def encoder_graph(spec: CaptionerSpec, *, device_id: int = 0, own_process: bool = False) -> GraphSpec:
    """The graph of the encoder. `device_id` is the device of an OM, if the spec names none."""
    assert spec.encoder is not None, "the spec checks that there is one"
    kind: GraphKind = "onnx" if spec.vision_kind == "onnx" else "om"
    if kind == "om" and spec.encoder_device is not None:
        device_id = om_device_id(spec.encoder_device)
    return GraphSpec(
        kind=kind,
        path=spec.encoder,
        device_id=device_id,
        provider=encoder_provider(spec),
        own_process=spec.encoder_process or own_process,
    )


def check_encoder_exists(spec: CaptionerSpec) -> None:
    """Raise GraphError for an encoder that does not exist. Called before a device is opened or gigabytes are read."""
    if spec.encoder is not None and not Path(spec.encoder).exists():
        maker = "encode" if spec.vision_kind == "prefixes" else f"export {spec.vision_kind}"
        raise GraphError(f"The encoder `{spec.encoder}` does not exist", hint=f"`llama-adapter {maker}` makes one")


def encoder_files(spec: CaptionerSpec) -> list[Path]:
    """The file of an exported encoder, or the OM files of its folder."""
    assert spec.encoder is not None
    place = Path(spec.encoder)
    return sorted(place.glob("*.om")) if place.is_dir() else [place]


def encoder_identity(spec: CaptionerSpec, *, channel_order: ChannelOrder = "rgb") -> str:
    """Identifies an exported encoder in records, by the sizes and times of its files but not by their names.

    `channel_order` is the order of the pixels that the encoder receives.
    """
    stats = [(stat.st_size, stat.st_mtime_ns) for stat in (file.stat() for file in encoder_files(spec))]
    given = () if channel_order == "rgb" else (channel_order,)
    return hashlib.sha256(repr((spec.vision_kind, stats, *given)).encode()).hexdigest()[:16]
