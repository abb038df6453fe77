"""The fake ais_bench follows the rules of the real `InferSession` that our code relies on."""

import ctypes
import importlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.exported import make_om, sample_pixels, sample_queries

LIMIT = 6e-3


@pytest.fixture
def interface(acl: Any) -> Any:
    return importlib.import_module("ais_bench.infer.interface")


@pytest.fixture
def static(tmp_path: Path) -> str:
    return str(make_om(tmp_path / "clip_bs2.om", [2]))


@pytest.fixture
def gears(tmp_path: Path) -> str:
    return str(make_om(tmp_path / "clip.om", [1, 4]))


def half(num_pictures: int) -> np.ndarray:
    return sample_pixels()[:num_pictures].astype(np.float16)


def largest_difference(output: np.ndarray) -> float:
    return float(np.abs(output.astype(np.float32) - sample_queries()[: len(output)].numpy()).max())


def printed(capfd: pytest.CaptureFixture[str]) -> str:
    ctypes.CDLL(None).fflush(None)
    return capfd.readouterr().out


def test_only_the_number_of_bytes_is_compared(interface: Any, static: str, capfd: pytest.CaptureFixture[str]) -> None:
    session = interface.InferSession(0, static)
    turned = np.ascontiguousarray(half(2).transpose(0, 3, 1, 2))
    wider = sample_pixels()[:1].astype(np.float32)

    assert largest_difference(session.infer([half(2)])[0]) < LIMIT
    for wrong in (turned, wider):
        assert not largest_difference(session.infer([wrong])[0]) < 100 * LIMIT  # noise, or not a number
    with pytest.raises(RuntimeError, match=r"^\[-1\]\[ACL: general failure\] $"):
        session.infer([half(1)])
    assert "check i:0 name:input in size:301056 needsize:602112 not match" in printed(capfd)


def test_gears_accept_their_batch_sizes_only(interface: Any, gears: str) -> None:
    session = interface.InferSession(0, gears)

    assert (session.get_inputs()[0].shape, session.get_inputs()[0].size) == ([-1, 224, 224, 3], half(4).nbytes)
    for num_pictures in (4, 1):
        output = session.infer([half(num_pictures)], mode="dymbatch")[0]
        assert len(output) == num_pictures
        assert largest_difference(output) < LIMIT
    with pytest.raises(RuntimeError, match=r"^\[1\]\[ACL: invalid parameter\] $"):
        session.infer([half(3)], mode="dymbatch")


def test_paths_are_checked_since_2024(acl: Any, interface: Any, static: str, tmp_path: Path) -> None:
    link, open_to_all, odd = tmp_path / "link.om", tmp_path / "all.om", tmp_path / "a b.om"
    link.symlink_to(static)
    for file in (open_to_all, odd):
        file.write_bytes(Path(static).read_bytes())
        os.chmod(file, 0o660 if file is open_to_all else 0o640)
    texts = {
        link: f"The path:{link} is illegal. Please check the error log for more detail.",
        open_to_all: f"The path:{open_to_all} is illegal. Please check the error log for more detail.",
        odd: "The path string is illegal. Please check.",
        tmp_path: f"The path:{tmp_path} is not a file.",
    }
    for path, text in texts.items():
        if acl.GENERATION >= 2024:
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                interface.InferSession(0, str(path))
        elif path != tmp_path:
            interface.InferSession(0, str(path))


def test_wrong_files_chips_and_devices_give_a_code(
    interface: Any, static: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    corrupt = tmp_path / "corrupt.om"
    corrupt.write_bytes(b"noise")
    corrupt.chmod(0o640)
    monkeypatch.setenv("FAKE_SOC", "Ascend910B3")
    for file in (str(corrupt), static):
        with pytest.raises(RuntimeError, match=r"^\[1\]\[ACL: invalid parameter\] $"):
            interface.InferSession(0, file)
    assert printed(capfd).count("[ERROR] load model from file failed") == 2
    with pytest.raises(RuntimeError, match=r"^\[507033\]\[Error code unknown\] $"):
        interface.InferSession(7, static)


def test_its_context_stays_in_the_calling_thread(acl: Any, interface: Any, static: str) -> None:
    before = acl.STATE.context
    session = interface.InferSession(0, static)
    after = acl.STATE.context
    acl.STATE.context = before
    session.infer([half(2)])
    assert before != after == acl.STATE.context


def test_times_are_pairs_since_2024(acl: Any, interface: Any, static: str) -> None:
    session = interface.InferSession(0, static)
    session.infer([half(2)])
    (entry,) = session.summary().exec_time_list
    assert isinstance(entry, tuple) == (acl.GENERATION >= 2024)
    session.reset_summaryinfo()
    assert session.summary().exec_time_list == []
