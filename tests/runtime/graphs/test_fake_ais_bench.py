"""The fake ais_bench behaves like the real `InferSession` in everything that our code relies on."""

import ctypes
import importlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.exported import make_om, query_limit, sample_pixels, sample_queries


@pytest.fixture
def interface(acl: Any) -> Any:
    return importlib.import_module("ais_bench.infer.interface")


@pytest.fixture
def static(tmp_path: Path) -> str:
    return str(make_om(tmp_path / "clip_bs2.om", [2]))


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

    assert largest_difference(session.infer([half(2)])[0]) <= query_limit("float16")
    for wrong in (turned, wider):
        assert not largest_difference(session.infer([wrong])[0]) < 100 * query_limit("float16")  # noise, or NaN
    with pytest.raises(RuntimeError, match=r"^\[-1\]\[ACL: general failure\] $"):
        session.infer([half(1)])
    assert "check i:0 name:input in size:301056 needsize:602112 not match" in printed(capfd)


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


def test_its_context_stays_in_the_calling_thread(acl: Any, interface: Any, static: str) -> None:
    before = acl.STATE.context
    session = interface.InferSession(0, static)
    after = acl.STATE.context
    acl.STATE.context = before
    session.infer([half(2)])
    assert before != after == acl.STATE.context
