"""The weights of a spec, from a bundle or from checkpoints, as a stream of the decoder's tensors."""

from pathlib import Path

from llama_adapter.app.models.bundle_manifest import read_configs, read_manifest
from llama_adapter.app.models.checkpoints import StreamedModel, sources_of, stream_llama, stream_sources
from llama_adapter.app.models.input_scales import insert_scales
from llama_adapter.app.models.lora_bundle import stream_merged_bundle
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.app.models.packed_weights import TakePacked
from llama_adapter.app.models.quantised_model import quantise_model
from llama_adapter.app.models.random_model import RandomLoader, decoder_config, parse_size
from llama_adapter.app.models.sketch import Dtype, dtype_of
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.split import shares_of
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

    With `ranks`, the decoder's tensors are this process's share. If pictures are encoded elsewhere, CLIP may be
    missing; `encoder` is the card of that encoder, if it has one. Without `take_packed`, all weights are unpacked.
    """
    if spec.llama_dir is None:
        model, tensors = stream_merged_bundle(
            bundle_folder(spec.model),
            spec.lora,
            dtype=dtype,
            context=spec.context,
            channel_order=None if spec.channel_order == "auto" else spec.channel_order,
            cast_vision=spec.vision_kind == "torch",
            precision=spec.precision,
            take_packed=take_packed,
            ranks=ranks,
        )
        return model, insert_scales(tensors, model.input_scales) if spec.operators == "w8a8" else tensors
    precision = spec.precision or FLOAT
    # Weights are quantised from the values in the files, so that they are rounded only once.
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


def check_split(spec: CaptionerSpec, *, random: RandomLoader | None = None) -> None:
    """Raise UsageError if the decoder of `spec`, or a `random` one, cannot be divided over the ranks of `spec`.

    The check reads no weights, so that it can run before ranks are started. Raises CheckpointError for damaged files.
    """
    if random is not None:
        decoder = decoder_config(parse_size(random.name))
    elif spec.llama_dir is None:
        place = Path(bundle_folder(spec.model))
        _, decoder = read_configs(place, read_manifest(place))
    else:
        decoder = stream_llama(spec, dtype=None)[0].decoder_config
    shares_of(decoder, spec.tensor_parallel)
