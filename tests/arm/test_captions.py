"""On an ARM processor, the kernels give the same captions as torch for the embedded model."""

import ctypes
import json
import os
from typing import Any

import pytest

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from llama_adapter.runtime.kernels.instruction_sets import choose_instructions, processor_flags
from llama_adapter.runtime.kernels.library import find_library

SAMPLES = sorted(str(path) for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))[:2]
# The position of processor features in a process's auxiliary vector: key and bit, from Linux's hwcap.h.
FEATURES = {"asimddp": (16, 20), "i8mm": (26, 13), "bf16": (26, 14)}


def ids(pictures: list[str], *, batch_size: int, **options: Any) -> list[tuple[int, ...]]:
    captioner = Captioner.load(batch_size=batch_size, **options)
    return [tuple(answer.token_ids) for answer in captioner.generate(pictures)]


def test_the_kernels_are_in_use_with_the_processors_extras() -> None:
    finding = find_library()

    assert finding.library is not None, finding.reason
    assert finding.library.instruction_set == "neon"
    instructions = choose_instructions()
    assert not isinstance(instructions, str)
    assert instructions.extras() == tuple(os.environ["EXTRAS"].split())


def test_linux_lists_the_features_that_the_processor_has() -> None:
    auxiliary = ctypes.CDLL(None).getauxval
    auxiliary.restype, auxiliary.argtypes = ctypes.c_ulong, [ctypes.c_ulong]

    assert {name for name, (key, bit) in FEATURES.items() if auxiliary(key) >> bit & 1} == set(
        FEATURES
    ) & processor_flags()


def test_captions_are_torchs_alone_and_in_a_batch() -> None:
    expected = ids(SAMPLES, batch_size=3, dtype="float32", operators="aten")

    assert ids(SAMPLES, batch_size=3, dtype="float32") == expected
    assert ids(SAMPLES, batch_size=1, dtype="float32") == expected


@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"precision": "int8"}, {"precision": "int4"}],
    ids=["float32", "bfloat16", "int8", "int4"],
)
def test_the_known_answer_is_given_in_each_number_format(options: dict[str, Any]) -> None:
    known = json.loads((embedded_model() / "known_answer.json").read_text(encoding="utf-8"))

    made = ids([os.fspath(embedded_model() / known["picture"])], batch_size=1, **options)

    assert made == [tuple(known["token_ids"])]
