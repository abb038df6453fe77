"""Out-of-distribution detection by Mahalanobis distances of the visual queries, with one class.

The method is that of Lee et al., 2018 (arXiv:1807.03888). A model's owner fits the detector on pictures like the
training data (`scripts/train_embedded/familiar.py` is an example) and stores it in the bundle. The detector does not
say whether an answer is correct.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import read_arrays

# B pictures, Q visual queries, D their width, K kept directions of a query

Floats = NDArray[np.float32]

_TENSORS: Final = ("mean", "directions", "variances", "least_variance", "threshold")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OodDetector:
    """The distribution of the visual queries of familiar pictures, and the largest distance of a familiar picture.

    The distance of a picture is the squared Mahalanobis distance of its visual queries from their mean over familiar
    pictures, summed over the queries. `least_variance` is a lower bound of variances, so that rounding noise of another
    dtype has little effect.
    """

    mean_QD: Floats
    directions_QKD: Floats  # orthonormal for each query; zeros if a query has fewer than K
    variances_QK: Floats  # along these directions, at least `least_variance`
    least_variance: float  # along all other directions
    threshold: float

    def __post_init__(self) -> None:
        num_queries, width = self.mean_QD.shape if self.mean_QD.ndim == 2 else (-1, -1)
        num_kept = self.variances_QK.shape[1] if self.variances_QK.ndim == 2 else -1
        wanted = (num_queries, num_kept, width), (num_queries, num_kept)
        if (self.directions_QKD.shape, self.variances_QK.shape) != wanted:
            raise ValueError(
                "wanted mean (Q, D), directions (Q, K, D) and variances (Q, K), got the shapes "
                f"{self.mean_QD.shape}, {self.directions_QKD.shape} and {self.variances_QK.shape}"
            )
        values = (self.mean_QD, self.directions_QKD, self.variances_QK, self.least_variance, self.threshold)
        if not all(np.isfinite(value).all() for value in values):
            raise ValueError("wanted finite numbers, and some are not")
        if self.least_variance <= 0 or (self.variances_QK < self.least_variance).any():
            raise ValueError(f"variances must be at least least_variance, and that above 0, got {self.least_variance}")
        if self.threshold < 0:
            raise ValueError(f"the threshold must be 0 or more, as distances are, got {self.threshold}")

    def distances(self, visual_query_BQD: Floats) -> NDArray[np.float64]:
        """Distance of each picture (B,); visual queries are float32 (B, Q, D). Raises ValueError for other shapes."""
        if visual_query_BQD.shape[1:] != self.mean_QD.shape:
            raise ValueError(f"wanted visual queries (B, Q, D) with {self.mean_QD.shape}, got {visual_query_BQD.shape}")
        offset_QBD = (visual_query_BQD - self.mean_QD).swapaxes(0, 1)
        along_QBK = offset_QBD @ self.directions_QKD.swapaxes(1, 2)
        # All other directions have the variance `least_variance`.
        gain_QK = 1 / self.variances_QK - 1 / self.least_variance
        total_B = np.square(offset_QBD, dtype=np.float64).sum((0, 2)) / self.least_variance
        distances: NDArray[np.float64] = total_B + (np.square(along_QBK, dtype=np.float64) * gain_QK[:, None]).sum(
            (0, 2)
        )
        return distances

    def unfamiliar(self, visual_query_BQD: Floats) -> list[bool]:
        """Whether the distance of each picture exceeds the threshold, is infinite or is NaN."""
        return [not distance <= self.threshold for distance in self.distances(visual_query_BQD)]

    def save(self, path: Path) -> None:
        """Write the detector as safetensors, atomically. Raises OSError.

        The file has float32 tensors: mean (Q, D), directions (Q, K, D), variances (Q, K), least_variance and
        threshold (1,).
        """
        numbers = (self.mean_QD, self.directions_QKD, self.variances_QK, [self.least_variance], [self.threshold])
        tensors = zip(_TENSORS, numbers, strict=True)
        content = {name: np.array(value, dtype=np.float32, order="C") for name, value in tensors}
        with atomic_write(path) as file:
            file.write(save(content))


def read_familiarity(path: Path, *, num_queries: int, width: int) -> OodDetector:
    """Read a file of `OodDetector.save`. Raises CheckpointError if it is damaged or has other sizes."""
    hint = "the bundle is damaged or was changed by hand; copy the whole folder again, or fit it again"
    tensors = read_arrays(path)
    if tensors.keys() != set(_TENSORS) or any(tensor.dtype != np.float32 for tensor in tensors.values()):
        raise CheckpointError(f"`{path}` does not hold the float32 tensors {', '.join(_TENSORS)} alone", hint=hint)
    mean, directions, variances, least, threshold = (tensors[name] for name in _TENSORS)
    try:
        if mean.shape != (num_queries, width) or not least.shape == threshold.shape == (1,):
            raise ValueError(f"it is of visual queries {mean.shape}, and the model has {(num_queries, width)}")
        return OodDetector(
            mean_QD=mean,
            directions_QKD=directions,
            variances_QK=variances,
            least_variance=float(least[0]),
            threshold=float(threshold[0]),
        )
    except ValueError as error:
        raise CheckpointError(f"`{path}` cannot tell pictures apart for this model: {error}", hint=hint) from None
