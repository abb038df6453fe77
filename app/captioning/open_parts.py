"""Chooses the module that makes a captioner's parts from a spec. Torch is imported only for models that need it."""

from llama_adapter.app.captioning.parts import Parts
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.torch_import import note_torch_import


def open_parts(spec: CaptionerSpec) -> Parts:
    """Load the model of a spec onto its device. Raises DeviceError, CheckpointError and GraphError."""
    if spec.decoder is not None:
        from llama_adapter.app.captioning.assemble_exported import assemble_exported

        return assemble_exported(spec)
    try:
        from llama_adapter.app.captioning.assemble import assemble_parts
    except RuntimeError as error:
        note_torch_import(error)
        raise
    return assemble_parts(spec)
