"""Runs the picture encoder with the C kernels, as a module of torch."""

import torch
from torch import Tensor, nn

from llama_adapter.runtime.devices.cpu_linear import kernel_arrays
from llama_adapter.runtime.kernels.arrays import Arrays
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.runtime.kernels.threads import torch_stands_aside
from llama_adapter.runtime.schemes.scheme import dtype_name
from llama_adapter.vision.backends.base import as_array
from llama_adapter.vision.backends.kernels import KernelQueries, KernelTower
from llama_adapter.vision.config import QueryConfig, VisionConfig
from llama_adapter.vision.inference import HostEncoder


class NativeEncoder(nn.Module):
    """A `HostEncoder` computed by the kernels while torch's threads are idle.

    Torch computes connectors, and visual-query blocks with layers that the kernels do not take. `arrays` are those of
    the whole encoder; None if torch computes a part.
    """

    def __init__(self, encoder: HostEncoder, config: VisionConfig, tower: Arrays, *, library: Library) -> None:
        """`tower` are the arrays of the encoder's tower, see `tower_arrays`."""
        super().__init__()
        self.encoder, self._dtype = encoder, encoder.patches.dtype
        dtype, queries = dtype_name(self._dtype), kernel_arrays(nn.ModuleDict({"query": encoder.query}))
        self._tower, self._queries = KernelTower(config.clip, tower, dtype=dtype, library=library), None
        self.arrays: Arrays | None = None
        if queries is not None and isinstance(config.query, QueryConfig):
            dim = config.clip.output_dim
            self._queries = KernelQueries(config.query, queries, input_dim=dim, dtype=dtype, library=library)
            self.arrays = {**tower, **queries}

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        """See `HostEncoder.forward`."""
        with torch_stands_aside():
            features_BFC = torch.from_numpy(self._tower(pixels_BHWC.numpy())).to(self._dtype)
            if self._queries is not None:
                return torch.from_numpy(self._queries(as_array(features_BFC))).to(self._dtype)
            query_BQD: Tensor = self.encoder.query(features_BFC)
            return query_BQD


def tower_arrays(encoder: HostEncoder) -> Arrays | None:
    """What the kernels read of the tower; None if they do not take all of its linear layers."""
    return kernel_arrays(nn.ModuleDict({"patches": encoder.patches, "clip": encoder.clip}))
