"""The weights of a bundle as numpy arrays, as the C kernels take them: what `stream_bundle` does without torch.

Everything that this way cannot do, or finds damaged, is left to `stream_bundle`, which says what is wrong.
"""

# O outputs, I inputs, G groups of 32 inputs, P pairs of inputs

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import numpy as np

from llama_adapter.llm.config import FINER_WEIGHTS, DecoderConfig
from llama_adapter.runtime.kernels.arrays import GROUP, numbers, stored
from llama_adapter.runtime.kernels.layout import PACKED
from llama_adapter.runtime.kernels.library import KINDS, Library
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.schemes.arrays import balancing_factors, round_int4, round_int8, widened
from llama_adapter.vision.config import NORM_READERS, ConnectorConfig, VisionConfig

_FLOATS: Final[Mapping[str, Any]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
_FEW_BITS: Final[Mapping[str, Any]] = {"int8": np.int8, "int4": np.uint8}


class BundleArrays(Mapping[str, np.ndarray]):
    """The tensors of a bundle by the names that `ArrayLinear` and its users ask for, converted when they are asked for.

    Floats are in `dtype`, and the weights of linear layers in the precision `wanted`. Looking up a name raises KeyError
    if there is no such tensor, and ValueError for one that is damaged or of another type.
    """

    def __init__(
        self,
        tensors: Mapping[str, np.ndarray],
        *,
        stored_dtype: str,
        stored_precision: Precision,
        finer_weights: Mapping[str, Precision],
        dtype: str,
        wanted: Precision,
        without_bias: Collection[str],
        library: Library,
    ) -> None:
        """`tensors` are those of `map_arrays`, stored as the manifest says; `without_bias` are layers that have none.

        `finer_weights` are the weights that are not stored in `stored_precision`, with the precision of each. Raises
        ValueError for weights packed as another kind, and if weights of few bits are wanted in other ones.
        """
        if stored_precision not in (FLOAT, wanted) and wanted != FLOAT:
            raise ValueError(f"{stored_precision} weights are wanted as {wanted}")
        self._stored, self._dtype, self._library = _FLOATS[stored_dtype], dtype, library
        self._without_bias = without_bias
        self._stored_precision, self._finer_weights, self._wanted = stored_precision, finer_weights, wanted
        self._tensors: dict[str, np.ndarray] = {}
        self._made: dict[str, np.ndarray] = {}  # the kernels read them, so they are kept
        self._factors: dict[str, np.ndarray] = {}  # of balanced norms
        for name, tensor in tensors.items():
            weight, is_packed, kind = name.partition(PACKED)
            precision = self._precision_of(weight)
            if is_packed and kind != (stored_dtype if precision == FLOAT else precision):
                raise ValueError(f"`{name}` is not packed in {precision}")
            if is_packed:
                name = f"{weight.removesuffix('weight')}{'uint8' if kind == 'int4' else kind}"
            self._tensors[name.replace(".weight_scale", ".scale")] = tensor
        self._unread = set(self._tensors)

    def require_all_read(self) -> None:
        """Raise ValueError for tensors that nobody looked up."""
        if self._unread:
            raise ValueError(f"unknown tensors {sorted(self._unread)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._made:
            return self._made[name]
        owner, _, part = name.rpartition(".")
        if part == "scale" and f"{owner}.int8" not in self._tensors:
            raise KeyError(name)  # that of a plain weight is made with the weight
        if part == "bias" and (name in self._tensors) == (owner in self._without_bias):
            raise ValueError(f"`{owner}` lacks its bias, or should have none")
        array = self._read(name)
        if part in KINDS:
            return array
        if part == "weight" and array.ndim == 2 and owner != "embedding":
            return self._weight(owner, array)
        self._made[name] = self._scale(owner) if part == "scale" else self._float(owner, name)
        return self._made[name]

    def _precision_of(self, weight: str) -> Precision:
        return self._finer_weights.get(weight, self._stored_precision)

    def _read(self, name: str) -> np.ndarray:
        array = self._tensors[name]
        self._unread.discard(name)
        return array

    def _float(self, owner: str, name: str) -> np.ndarray:
        norm = owner.rpartition(".")[2]
        if norm in NORM_READERS and (factors_I := self._balance(owner, NORM_READERS[norm])) is not None:
            return stored(self._numbers(name) / factors_I, self._dtype)
        return self._cast(name)

    def _weight(self, owner: str, array: np.ndarray) -> np.ndarray:
        """A plain weight; its scales, if it has some, are kept. A width that the kernels lack is widened."""
        name = f"{owner}.weight"
        if self._stored_precision != FLOAT:
            if array.dtype != _FEW_BITS[self._precision_of(name)]:
                raise ValueError(f"`{name}` is {array.dtype}")
            scale = self._scale(owner)
        elif self._wanted == FLOAT:
            return self._cast(name)
        else:
            array, scale = self._rounded(owner)
        if self._wanted == FLOAT or (array.dtype == np.uint8 and array.shape[1] % (GROUP // 2)):
            return stored(widened(array, scale), self._dtype)
        self._made[f"{owner}.scale"] = scale
        return array

    def _scale(self, owner: str) -> np.ndarray:
        """Stored scales, (O,) or (O, G)."""
        scale = self._read(f"{owner}.scale")
        is_int8 = f"{owner}.int8" in self._tensors or self._tensors[f"{owner}.weight"].dtype == np.int8
        if scale.dtype != (np.float32 if is_int8 else np.float16):
            raise ValueError(f"the scales of `{owner}` are {scale.dtype}")
        if not (np.isfinite(scale) & (scale > 0 if is_int8 else scale != 0)).all():
            raise ValueError(f"`{owner}` has scales that are 0 or not finite")
        return scale

    def _numbers(self, name: str) -> np.ndarray:
        """A stored tensor of floats, in float32."""
        array = self._read(name)
        if array.dtype != self._stored:
            raise ValueError(f"`{name}` is {array.dtype}, where {self._stored} is wanted")
        return array.astype(np.float32) if array.dtype == np.float16 else numbers(array)

    def _cast(self, name: str) -> np.ndarray:
        if self._stored == np.uint16 and self._dtype == "bfloat16":
            self._numbers(name)
            return self._tensors[name]
        floats = self._numbers(name)
        if self._dtype != "float32" and not np.isfinite(floats).all():
            raise ValueError(f"`{name}` has numbers that are not finite")
        return stored(floats, self._dtype)

    def _balance(self, norm: str, reader: str) -> np.ndarray | None:
        """Factors (I,) of a norm and of the columns of the layer that reads it; None if they stay as they are.

        See `runtime.schemes.balancing.balancing_factors`, which computes the same in torch.
        """
        columns = f"{norm.rpartition('.')[0]}.{reader}.weight"
        if self._wanted == FLOAT or self._stored_precision != FLOAT or columns not in self._tensors:
            return None
        if norm not in self._factors:
            self._factors[norm] = balancing_factors(
                self._numbers(f"{norm}.weight"),
                self._numbers(f"{norm}.bias"),
                self._numbers(columns),
                dtype=self._dtype,
            )
        return self._factors[norm]

    def _rounded(self, owner: str) -> tuple[np.ndarray, np.ndarray]:
        """A weight as the schemes int8 and int4 round it, with its scales. Raises ValueError where they refuse."""
        floats_OI = self._numbers(f"{owner}.weight")
        for norm, reader in NORM_READERS.items():
            start = owner.removesuffix(f".{reader}")
            if start != owner and f"{start}.{norm}.weight" in self._tensors:
                factors_I = self._balance(f"{start}.{norm}", reader)
                floats_OI = floats_OI if factors_I is None else floats_OI * factors_I
        if not np.isfinite(floats_OI).all() or floats_OI.shape[1] % 2:
            raise ValueError(f"`{owner}` cannot be rounded to few bits")
        if self._wanted == "int4" and f"{owner}.weight" not in FINER_WEIGHTS:
            codes_OGP, scales_OG = round_int4(floats_OI, library=self._library)
            codes_OP = codes_OGP.reshape(len(floats_OI), -1)[:, : floats_OI.shape[1] // 2]
            return np.ascontiguousarray(codes_OP), scales_OG
        return round_int8(floats_OI)


def num_weights(tensors: Mapping[str, np.ndarray]) -> int:
    """The number of weights in stored tensors, without their scales; of packed ones nearly."""
    count = 0.0
    for name, tensor in tensors.items():
        kind = name.partition(PACKED)[2]
        if not name.endswith("_scale"):
            each = _BYTES_OF_PACKED[kind] if kind else 0.5 if tensor.dtype == np.uint8 else tensor.itemsize
            count += tensor.nbytes / each
    return int(count)


_BYTES_OF_PACKED: Final = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 18 / GROUP}  # of a weight


def layers_without_bias(vision: VisionConfig, decoder: DecoderConfig) -> set[str]:
    """The names of the linear layers that have no bias."""
    names = {"head", "clip.projection", *(f"adapter.kv.{index}" for index in range(decoder.num_adapter_layers))}
    has_none = isinstance(vision.query, ConnectorConfig) and not vision.query.has_bias
    return names | {"query.up", "query.down"} if has_none else names
