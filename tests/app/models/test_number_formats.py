"""A precision without operators on a device: refused if it is requested, widened if the stored weights have it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.jobs.picture_encoders import OpenEncoder
from llama_adapter.app.jobs.torch_encoders import open_weights
from llama_adapter.app.models.bundle import stream_bundle
from llama_adapter.app.models.bundle_manifest import MANIFEST
from llama_adapter.app.models.memory_fit import place_model
from llama_adapter.app.models.number_formats import DtypeChoice, ModelSizes
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec, EncoderSources
from llama_adapter.runtime import devices
from llama_adapter.runtime.devices import EAGER, CpuBackend
from llama_adapter.runtime.devices.base import Accelerator
from llama_adapter.runtime.errors import DeviceError, UsageError
from llama_adapter.runtime.schemes import Precision
from tests.app.models.bundles import older_int4
from tests.llm.toys import NEEDS_KERNELS


class Picky(CpuBackend):
    """A chip with operators for 8-bit weights, but not for 8-bit activations."""

    name = "toy:0"

    def computes_in(self, precision, activations, *, wanted="auto"):
        return precision == "float"

    def refusal(self, precision, *, wanted="auto"):
        allowed = wanted == "aten" or (precision == "int8" and wanted == "auto")
        return "" if allowed else f"it has no {wanted} for {precision}"


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Accelerator(kind="toy", is_installed=lambda: True, count=lambda: 1, open=lambda index: Picky())
    monkeypatch.setattr(devices, "ACCELERATORS", (toy,))


@pytest.mark.parametrize(
    ("precision", "operators", "why", "ways"),
    [
        ("int4", "auto", "it has no auto for int4", "`--precision int8` or `--precision float`"),
        ("int8", "w8a8", "it has no w8a8 for int8", "`--operators auto`"),
    ],
)
def test_a_precision_that_is_asked_for_is_refused_before_the_model_is_read(
    precision: str, operators: str, why: str, ways: str, tmp_path: Path
) -> None:
    shutil.copy(embedded_model() / MANIFEST, tmp_path)  # the files that it names are missing
    with pytest.raises(DeviceError) as caught:
        Captioner.load(tmp_path, device="toy:0", precision=precision, operators=operators)

    assert caught.value.message == f"toy:0 does not compute with `--precision {precision}`: {why}"
    assert caught.value.hint == f"pass {ways}; `--operators aten` widens the weights"


def test_a_stored_precision_and_plain_operators_widen(embedded: Callable[[Precision], Path]) -> None:
    picture = sorted(sample_pictures().glob("*.png"))[0]
    stored = Captioner.load(embedded("int4"), device="toy:0")
    plain = Captioner.load(precision="int4", operators="aten", device="toy:0")

    widened = "4-bit weights are widened to float32 here, with its memory and speed"
    assert stored.info.notes[-1] == f"{widened} (it has no auto for int4)"
    assert plain.info.notes[-1] == widened
    assert stored.generate([picture])[0].text == plain.generate([picture])[0].text


def test_an_encoder_alone_is_refused_and_told_alike(embedded: Callable[[Precision], Path]) -> None:
    sources = EncoderSources(model=str(embedded("int4")))
    how = {"exif": "upright", "reading": "exact", "transparency": "white", "keeps": "queries"}

    def opened(**options: Any) -> OpenEncoder:
        return open_weights(CaptionerSpec(device="toy:0", batch_size=1, **options), sources, how)[1]

    with pytest.raises(DeviceError, match="toy:0 does not compute with `--precision int4`"):
        opened(precision="int4")
    with pytest.raises(UsageError, match="needs 8-bit weights"):
        opened(operators="w8a8")
    widened = "4-bit weights are widened to float32 here, with its memory and speed"
    assert opened().notes == (f"{widened} (it has no auto for int4)",)
    assert opened(operators="aten").notes == (widened,)


@NEEDS_KERNELS
def test_plans_count_the_head_as_it_is_stored(
    embedded: Callable[[Precision], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, spec = CpuBackend(), CaptionerSpec(device="cpu", batch_size=1)
    seen: list[tuple[int, int, int]] = []  # bytes of the head, and of the plans before and after the dtype is chosen
    planned: list[int] = []
    monkeypatch.setattr(
        "llama_adapter.app.models.memory_fit.check_memory", lambda plan, *_, **__: planned.append(plan.total)
    )
    for bundle in (embedded("int4"), older_int4(tmp_path / "older")):

        def choose(sizes: ModelSizes) -> torch.dtype:
            planned.append(DtypeChoice(spec, backend=backend, mode=EAGER).needed_bytes(sizes, "float32"))
            return torch.float32

        planned.clear()
        model, tensors = stream_bundle(bundle, dtype=choose)
        state = dict(tensors)
        place_model(model, state.items(), spec=spec, backend=backend, mode=EAGER)
        before, after = planned
        seen.append((sum(tensor.nbytes for name, tensor in state.items() if name.startswith("head.")), before, after))

    (head, *plans), (older_head, *older_plans) = seen
    assert head > older_head
    assert [new - old for new, old in zip(plans, older_plans, strict=True)] == [head - older_head] * 2
