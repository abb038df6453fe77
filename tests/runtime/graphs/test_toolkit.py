"""ATC is found in CANN's installation folders, and chips get the names that ATC accepts."""

import tomllib
from pathlib import Path

import pytest

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs import toolkit
from llama_adapter.runtime.graphs.toolkit import (
    Npu,
    NpuTable,
    detect_soc_version,
    find_atc,
    installed_folders,
    read_npu_smi,
    soc_from_board,
    toolkit_folders,
)

PRINTED = tomllib.loads(Path(__file__).with_name("npu_smi.toml").read_text(encoding="utf-8"))
HEAD, BOARD = PRINTED["head"], PRINTED["board"]
INFERENCE, TRAINING, LATER = (HEAD + PRINTED[name] for name in ("inference", "training", "later"))


def npu_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, *, info: str, board: str = "", code: int = 0) -> None:
    """Install an `npu-smi` that prints these texts. PATH then has only it and the shell."""
    (folder / "info").write_text(info)
    (folder / "board").write_text(board)
    program = folder / "npu-smi"
    program.write_text(
        f'#!/bin/sh\nif [ "$2" = -t ]; then while read -r x; do echo "$x"; done < "{folder}/board"; '
        f'else while read -r x; do echo "$x"; done < "{folder}/info"; fi; exit {code}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def names(table: str) -> list[tuple[int, str]]:
    return [(device.number, device.name) for device in read_npu_smi(table).devices]


def test_only_chips_are_read_from_the_table() -> None:
    assert names(INFERENCE) == [(0, "310P3"), (5, "310P3")]
    assert names(TRAINING) == [(2, "910B4-1")]
    assert names(LATER) == [(0, "Ascend910")]
    assert names(HEAD) == []
    assert read_npu_smi("DrvMngGetConsoleLogLevel failed") == NpuTable(driver="", devices=())


def test_a_board_without_a_bus_has_one_chip() -> None:
    table = HEAD + (
        "| 0     310B4               | Alarm           | 0.0          51                15    / 15            |\n"
        "| 0     0                   | NA              | 0            3046 / 7545                             |\n"
    )

    assert read_npu_smi(table) == NpuTable(driver="23.0.0", devices=(Npu(number=0, name="310B4", health="Alarm"),))


def test_a_board_needs_both_halves_of_the_name() -> None:
    assert soc_from_board(BOARD) == "Ascend910_9391"
    assert soc_from_board(BOARD.replace("9391", "NA")) is None
    assert soc_from_board("") is None


@pytest.mark.parametrize(
    ("info", "soc_version"), [(INFERENCE, "Ascend310P3"), (TRAINING, "Ascend910B4-1"), (LATER, "Ascend910_9391")]
)
def test_the_chip_of_this_machine_is_detected(
    info: str, soc_version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu_smi(tmp_path, monkeypatch, info=info, board=BOARD)

    assert detect_soc_version() == soc_version


@pytest.mark.parametrize(
    ("info", "code", "words"),
    [
        (HEAD, 0, "lists no Ascend chip"),
        (LATER, 0, "is a series"),
        (INFERENCE + "| 7     910B3   | OK   |\n", 0, "several kinds of chips: Ascend310P3, Ascend910B3"),
        ("DrvMngGetConsoleLogLevel failed\n", 1, "failed: DrvMngGetConsoleLogLevel"),
    ],
)
def test_an_ambiguous_chip_must_be_named(
    info: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GraphError, match="no `npu-smi`"):
        detect_soc_version()

    npu_smi(tmp_path, monkeypatch, info=info, code=code)
    with pytest.raises(GraphError, match=words) as caught:
        detect_soc_version()
    assert "--soc-version" in caught.value.hint


@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_INSTALL_PATH"])
@pytest.mark.parametrize("place", ["bin", "compiler/bin", "latest/bin", "aarch64-linux/bin"])
def test_atc_is_found_on_path_or_through_the_environment_of_cann(variable: str, place: str, tmp_path: Path) -> None:
    for folder in (place, "on-path"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "atc").touch(mode=0o755)

    assert find_atc({variable: str(tmp_path), "PATH": ""}) == tmp_path / place / "atc"
    assert find_atc({variable: str(tmp_path), "PATH": str(tmp_path / "on-path")}) == tmp_path / "on-path" / "atc"


def test_a_machine_without_atc_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "INSTALL_FOLDERS", ())

    with pytest.raises(GraphError, match="There is no `atc`") as caught:
        find_atc({"PATH": ""})

    assert "--print-command" in caught.value.hint


def test_toolkits_are_listed_from_the_environment_then_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolkit, "INSTALL_FOLDERS", ("~/Ascend",))
    base = tmp_path / "Ascend"
    for folder in ("ascend-toolkit/latest", "cann-8.5.0", "cann-8.5.1"):
        (base / folder).mkdir(parents=True)
    (base / "cann").symlink_to("cann-8.5.1")

    found = [str(folder.relative_to(base)) for folder in installed_folders({"HOME": str(tmp_path)})]

    assert found == ["cann", "cann-8.5.1", "cann-8.5.0", "ascend-toolkit", "ascend-toolkit/latest", "."]
    (tmp_path / "mine").mkdir()
    named = {"HOME": str(tmp_path), "ASCEND_HOME_PATH": str(tmp_path / "mine"), "ASCEND_TOOLKIT_HOME": "/not/there"}
    assert toolkit_folders(named)[:2] == [tmp_path / "mine", base / "cann"]
