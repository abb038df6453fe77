"""ATC is found where CANN puts it, and chips are named as ATC wants them."""

from pathlib import Path

import pytest

from vision.errors import EncoderError
from vision.export import toolkit
from vision.export.toolkit import detect_soc_version, find_atc, soc_from_board, soc_names

HEAD = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 23.0.0                                  Version: 23.0.0                                          |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
"""
INFERENCE = (
    HEAD
    + """\
| 0       310P3                 | OK              | NA           46                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1373 / 21527                            |
+===============================+=================+======================================================+
| 5       310P3                 | OK              | NA           46                0     / 0             |
| 0       1                     | 0000:02:00.0    | 0            1373 / 21527                            |
"""
)
TRAINING = (
    HEAD
    + """\
| 2     910B4-1             | OK            | 92.7        47                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          4169 / 65536         |
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 2       0                 | 31337         | python310                | 310                     |
"""
)
LATER = (
    HEAD
    + """\
| 0     Ascend910           | OK            | 171.8       35                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3104 / 65536         |
"""
)
BOARD = """\
        NPU ID                         : 0
        Chip ID                        : 0
        Chip Name                      : Ascend910
        NPU Name                       : 9391
        Chip Version                   : V1
"""


def npu_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, *, info: str, board: str = "", code: int = 0) -> None:
    """An `npu-smi` that prints these, alone on PATH but for the shell."""
    (folder / "info").write_text(info)
    (folder / "board").write_text(board)
    program = folder / "npu-smi"
    program.write_text(
        f'#!/bin/sh\nif [ "$2" = -t ]; then while read -r x; do echo "$x"; done < "{folder}/board"; '
        f'else while read -r x; do echo "$x"; done < "{folder}/info"; fi; exit {code}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_chips_of_the_table_are_read_and_nothing_else_of_it() -> None:
    assert soc_names(INFERENCE) == [(0, "310P3"), (5, "310P3")]
    assert soc_names(TRAINING) == [(2, "910B4-1")]
    assert soc_names(LATER) == [(0, "Ascend910")]
    assert soc_names(HEAD) == []


def test_a_board_says_both_halves_of_the_name_or_nothing() -> None:
    assert soc_from_board(BOARD) == "Ascend910_9391"
    assert soc_from_board(BOARD.replace("9391", "NA")) is None
    assert soc_from_board("") is None


@pytest.mark.parametrize(
    ("info", "soc_version"), [(INFERENCE, "Ascend310P3"), (TRAINING, "Ascend910B4-1"), (LATER, "Ascend910_9391")]
)
def test_the_chip_is_named_as_atc_wants_it(
    info: str, soc_version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu_smi(tmp_path, monkeypatch, info=info, board=BOARD)

    assert detect_soc_version() == soc_version


@pytest.mark.parametrize(
    ("info", "code", "said"),
    [
        (HEAD, 0, "lists no Ascend chip"),
        (LATER, 0, "a whole series"),
        (INFERENCE + "| 7     910B3   | OK   |\n", 0, "several kinds of chips: Ascend310P3, Ascend910B3"),
        ("DrvMngGetConsoleLogLevel failed\n", 1, "failed: DrvMngGetConsoleLogLevel"),
    ],
)
def test_a_chip_that_cannot_be_told_has_to_be_named(
    info: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu_smi(tmp_path, monkeypatch, info=info, code=code)

    with pytest.raises(EncoderError, match=said) as caught:
        detect_soc_version()

    assert "--soc-version" in caught.value.hint


def test_a_machine_without_chips_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(EncoderError, match="no `npu-smi`"):
        detect_soc_version()


@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_INSTALL_PATH"])
@pytest.mark.parametrize("place", ["bin", "compiler/bin", "latest/bin", "aarch64-linux/bin"])
def test_atc_is_found_through_the_environment_of_cann(variable: str, place: str, tmp_path: Path) -> None:
    atc = tmp_path / place / "atc"
    atc.parent.mkdir(parents=True)
    atc.touch(mode=0o755)

    assert find_atc({variable: str(tmp_path), "PATH": ""}) == atc


def test_atc_on_path_comes_first(tmp_path: Path) -> None:
    for folder in ("bin", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "atc").touch(mode=0o755)

    assert find_atc({"ASCEND_HOME_PATH": str(tmp_path), "PATH": str(tmp_path / "other")}) == tmp_path / "other" / "atc"


def test_a_machine_without_atc_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "_INSTALL_FOLDERS", ())

    with pytest.raises(EncoderError, match="There is no `atc`") as caught:
        find_atc({"PATH": ""})

    assert "--print-command" in caught.value.hint
