"""The instruction set chosen for a processor, and the compiler's options for it."""

import platform
from pathlib import Path

import pytest

from llama_adapter.runtime.errors import DeviceError, UsageError
from llama_adapter.runtime.kernels import instruction_sets
from llama_adapter.runtime.kernels.instruction_sets import CHOICE, INSTRUCTION_SETS, choose_instructions


@pytest.mark.parametrize(
    ("name", "optional", "options"),
    [
        ("avx2", {"avx_vnni"}, ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"]),
        ("avx512", {"avx512_bf16", "amx_int8"}, ["-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"]),
        ("neon", set(), ["-mcpu=generic"]),
        ("neon", {"asimddp"}, ["-mcpu=generic+dotprod"]),
        ("neon", {"asimddp", "bf16"}, ["-mcpu=generic+dotprod"]),  # not known, so no wheel has kernels for it
        ("neon", {"asimddp", "i8mm"}, ["-mcpu=generic+dotprod+i8mm"]),
        ("neon", {"asimddp", "i8mm", "bf16"}, ["-mcpu=generic+dotprod+i8mm+bf16"]),
    ],
)
def test_optional_features_are_options_of_the_compiler(
    name: str, optional: set[str], options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    instructions = next(one for one in INSTRUCTION_SETS if one.name == name)
    monkeypatch.setattr(instruction_sets, "processor_flags", lambda: frozenset({*instructions.needed, *optional}))

    assert instructions.options(instructions.extras())[-len(options) :] == options


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("flags\t\t: fma avx2\nbugs\t\t: mds\n\nflags\t\t: fma avx2\n", {"fma", "avx2"}),
        ("BogoMIPS\t: 50.00\nFeatures\t: fp asimd asimddp i8mm bf16\n", {"fp", "asimd", "asimddp", "i8mm", "bf16"}),
        ("processor\t: 0\n", set()),
        (None, set()),
    ],
    ids=["x86", "ARM", "another", "unknown"],
)
def test_features_of_the_processor_are_those_that_linux_lists(
    lines: str | None, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lines is not None:
        (tmp_path / "cpuinfo").write_text(lines)
    monkeypatch.setattr(instruction_sets, "Path", lambda _: tmp_path / "cpuinfo")

    assert instruction_sets.processor_flags.__wrapped__() == expected


def test_a_variable_names_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    avx512, avx2, _ = INSTRUCTION_SETS
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(instruction_sets, "processor_flags", lambda: frozenset({*avx512.needed, *avx2.needed}))
    for text, expected in [("avx2", avx2), ("AVX2", avx2), ("", avx512)]:
        monkeypatch.setenv(CHOICE, text)
        assert choose_instructions() == expected

    monkeypatch.setattr(instruction_sets, "processor_flags", lambda: frozenset(avx2.needed))
    monkeypatch.setenv(CHOICE, "avx512")
    with pytest.raises(DeviceError, match="'avx512', and this processor has no " + ", ".join(avx512.needed)):
        choose_instructions()

    for text in ("sse2", "neon"):
        monkeypatch.setenv(CHOICE, text)
        with pytest.raises(UsageError, match=f"LLAMA_ADAPTER_ISA is '{text}'") as raised:
            choose_instructions()
        assert raised.value.hint.startswith("it can be avx512 or avx2;")
