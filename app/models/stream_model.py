"""The weights of a spec, from a bundle or from checkpoints, as a stream of the decoder's tensors."""

from llama_adapter.app.models.bundle import stream_bundle
from llama_adapter.app.models.checkpoints import StreamedModel, sources_of, stream_llama, stream_sources
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.app.models.packed_weights import TakePacked
from llama_adapter.app.models.quantised_model import quantise_model
from llama_adapter.app.models.sketch import Dtype, dtype_of
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.ranks import ALONE, Alone
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.vision.card import EncoderCard


def stream_model(
    spec: CaptionerSpec,
    *,
    dtype: Dtype,
    encoder: EncoderCard | None = None,
    is_encoded_elsewhere: bool = False,
    take_packed: TakePacked | None = None,
    ranks: Alone = ALONE,
) -> StreamedModel:
    """The weights of `spec` on the CPU, in `dtype` and the precision of `spec`; the decoder's are read one by one.

    With ranks, the decoder's tensors are the share of the one that this process is.
    When pictures are encoded elsewhere, CLIP may be missing; `encoder` is the card of that encoder, if it has one.
    Without `take_packed` all weights are plain.
    """
    if spec.llama_dir is None:
        return stream_bundle(
            bundle_folder(spec.model),
            dtype=dtype,
            context=spec.context,
            channel_order=None if spec.channel_order == "auto" else spec.channel_order,
            cast_vision=spec.vision_kind == "torch",
            precision=spec.precision,
            take_packed=take_packed,
            ranks=ranks,
        )
    precision = spec.precision or FLOAT
    # Quantised as they are in the files, so that weights are rounded only once.
    read_in = dtype if precision == FLOAT else None
    if spec.is_llama_alone:
        model, tensors = stream_llama(spec, dtype=read_in, ranks=ranks)
    else:
        model, tensors = stream_sources(
            sources_of(spec), dtype=read_in, exported=is_encoded_elsewhere, encoder=encoder, ranks=ranks
        )
    if precision != FLOAT:
        vision_tensors = model.vision_state.values()
        dtype = dtype_of(dtype, decoder=model.decoder_config, encoder=vision_tensors, precision=precision)
        model, tensors = quantise_model(model, tensors, dtype=dtype, precision=precision)
    return model, tensors
