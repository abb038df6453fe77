"""Chooses onnxruntime's execution providers for the graphs of a spec. Imports no torch."""

from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.runtime.graphs.onnx_provider import CPU, OnnxProvider, provider_of_device


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
