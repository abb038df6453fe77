"""Ascend chips: which families there are and what each can do. Data only; torch_npu is not asked here."""

from dataclasses import dataclass

FRACTAL_NZ = 29  # torch_npu.Format: the tiled layout that the matrix unit reads


@dataclass(frozen=True, kw_only=True, slots=True)
class ChipFamily:
    """Chips that share their operators."""

    name: str
    # The codes of torch.npu.get_soc_version(); torch_npu 2.13, csrc/core/npu/NpuVariables.h.
    soc_versions: tuple[int, ...]
    dtypes: tuple[str, ...] = ("float16", "float32")
    graph_modes: tuple[str, ...] = ()
    # Linear weights of float16 in FRACTAL_NZ: pays where the matrix unit would rearrange them at every call.
    tiled_weights: bool = False
    # Whether operators can be compiled for every shape, and the choice for CANN's ready-made ones must be made. A
    # chip that only has those takes the choice for an error.
    may_compile_operators: bool = False


_WITH_BFLOAT16 = ("float16", "float32", "bfloat16")
_GRAPHS = ("npugraph_ex", "ge_graph")  # torchair's overview lists A2, A3 and 950, one NPU per process

FAMILIES = (
    ChipFamily(name="910", soc_versions=(100, 101, 102, 103, 104), tiled_weights=True, may_compile_operators=True),
    ChipFamily(
        name="310P", soc_versions=(200, 201, 202, 203, 204, 205), tiled_weights=True, may_compile_operators=True
    ),
    ChipFamily(
        name="A2",
        soc_versions=(220, 221, 222, 223, 224, 225),
        dtypes=_WITH_BFLOAT16,
        graph_modes=_GRAPHS,
        may_compile_operators=True,
    ),
    ChipFamily(name="310B", soc_versions=(240, 241, 242, 243), dtypes=_WITH_BFLOAT16, may_compile_operators=True),
    ChipFamily(
        name="A3",
        soc_versions=(250, 251, 252, 253, 254, 255, 256),
        dtypes=_WITH_BFLOAT16,
        graph_modes=_GRAPHS,
        may_compile_operators=True,
    ),
    ChipFamily(name="950", soc_versions=(260,), dtypes=_WITH_BFLOAT16, graph_modes=_GRAPHS),
)
UNKNOWN = ChipFamily(name="unknown", soc_versions=())


def family_of(soc_version: int) -> ChipFamily:
    """The family of a chip's code; `UNKNOWN`, which uses plain torch only, for codes of future chips."""
    return next((family for family in FAMILIES if soc_version in family.soc_versions), UNKNOWN)
