"""Float weights as they are: the scheme of models that are not quantised."""

from llama_adapter.runtime.schemes.scheme import Scheme, TensorForm

SCHEME = Scheme(
    name="float",
    title="full",
    weight_dtype=None,
    weights_per_item=1,
    suffixes=("",),
    forms=lambda shape, dtype: {"": TensorForm(shape, dtype)},
    quantise=lambda weight: {"": weight},
    dequantise=lambda parts: parts[""].float(),
    fault=lambda suffix, tensor: "",
)
