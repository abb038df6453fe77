"""The fake ais_bench has the real one's rules: else tests against it would prove nothing (ais_bench `InferSession`)."""

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


def is_new(acl: Any) -> bool:
    return bool(acl.GENERATION >= 2024)


def half(num_pictures: int) -> np.ndarray:
    return sample_pixels()[:num_pictures].astype(np.float16)


def largest_difference(output: np.ndarray) -> float:
    return float(np.abs(output.astype(np.float32) - sample_queries()[: len(output)].numpy()).max())


def printed(capfd: pytest.CaptureFixture[str]) -> str:
    ctypes.CDLL(None).fflush(None)
    return capfd.readouterr().out


def test_a_fixed_om_gives_fresh_arrays_of_the_right_numbers(interface: Any, static: str) -> None:
    session = interface.InferSession(0, static)
    first = session.infer([half(2)])[0]
    again = session.infer([half(2)])[0]
    assert largest_difference(first) < LIMIT
    assert first.flags.owndata
    assert not np.shares_memory(first, again)


def test_descriptors_name_their_types(interface: Any, static: str, gears: str) -> None:
    (fixed,) = interface.InferSession(0, static).get_inputs()
    (free,) = interface.InferSession(0, gears).get_inputs()
    assert (fixed.name, fixed.datatype.name, fixed.shape) == ("input", "float16", [2, 224, 224, 3])
    assert fixed.size == fixed.realsize == half(2).nbytes
    assert (free.shape, free.size) == ([-1, 224, 224, 3], half(4).nbytes)


def test_equal_bytes_in_another_layout_run_silently_and_give_noise(interface: Any, static: str) -> None:
    turned = np.ascontiguousarray(half(2).transpose(0, 3, 1, 2))
    assert largest_difference(interface.InferSession(0, static).infer([turned])[0]) > 100 * LIMIT


def test_equal_bytes_of_another_type_run_silently_and_give_noise(interface: Any, static: str) -> None:
    one_picture = sample_pixels()[:1].astype(np.float32)
    output = interface.InferSession(0, static).infer([one_picture])[0]
    difference = largest_difference(output)
    assert not difference < 100 * LIMIT  # or not a number


def test_another_number_of_bytes_is_a_code_and_words_on_stdout(
    interface: Any, static: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match=r"^\[-1\]\[ACL: general failure\] $"):
        interface.InferSession(0, static).infer([half(1)])
    assert "check i:0 name:input in size:301056 needsize:602112 not match" in printed(capfd)


def test_gears_set_the_bytes_wanted_and_must_be_met_exactly(interface: Any, gears: str) -> None:
    session = interface.InferSession(0, gears)
    for num_pictures in (4, 1):
        output = session.infer([half(num_pictures)], mode="dymbatch")[0]
        assert len(output) == num_pictures
        assert largest_difference(output) < LIMIT
        assert session.get_inputs()[0].realsize == half(num_pictures).nbytes
    with pytest.raises(RuntimeError, match=r"^\[1\]\[ACL: invalid parameter\] $"):
        session.infer([half(3)], mode="dymbatch")


def test_fixed_mode_on_gears_wants_the_largest(interface: Any, gears: str) -> None:
    session = interface.InferSession(0, gears)
    assert largest_difference(session.infer([half(4)])[0]) < LIMIT
    with pytest.raises(RuntimeError, match=r"\[-1\]"):
        session.infer([half(1)])


def test_gear_mode_on_a_fixed_om_is_refused(interface: Any, static: str) -> None:
    session = interface.InferSession(0, static)
    with pytest.raises(RuntimeError, match=r"^not a dymbatch model!$"):
        session.infer([half(2)], mode="dymbatch")
    with pytest.raises(RuntimeError, match=r"^input datas and intensors dim not matched!$"):
        session.infer([half(1)], mode="dymbatch")


def test_feeds_are_a_list_of_arrays(acl: Any, interface: Any, static: str) -> None:
    session = interface.InferSession(0, static)
    if is_new(acl):
        for feeds in ((half(2),), []):
            with pytest.raises(ValueError, match="the list"):
                session.infer(feeds)
        with pytest.raises(RuntimeError, match=r"^\[3\]\[ACL: runtime failure\] $"):
            session.infer([half(2), half(2)])
    else:
        assert largest_difference(session.infer((half(2),))[0]) < LIMIT
        with pytest.raises(AssertionError, match="undefined behaviour"):
            session.infer([half(2), half(2)])
    with pytest.raises(RuntimeError, match=r"^type:<class 'str'> invalid$"):
        session.infer(["pixels"])
    with pytest.raises(ValueError if is_new(acl) else RuntimeError, match=r"infer.mode"):
        session.infer([half(2)], mode="fixed")


def test_paths_are_checked_since_2024(acl: Any, interface: Any, static: str, tmp_path: Path) -> None:
    link, open_to_all, odd = tmp_path / "link.om", tmp_path / "all.om", tmp_path / "a b.om"
    link.symlink_to(static)
    for file in (open_to_all, odd):
        file.write_bytes(Path(static).read_bytes())
        os.chmod(file, 0o660 if file is open_to_all else 0o640)
    other = tmp_path / "clip.bin"
    other.write_bytes(b"")
    other.chmod(0o640)
    texts = {
        link: f"The path:{link} is illegal. Please check the error log for more detail.",
        open_to_all: f"The path:{open_to_all} is illegal. Please check the error log for more detail.",
        odd: "The path string is illegal. Please check.",
        other: f"The suffix of path:{other} not in ['om']. Please check.",
        tmp_path: f"The path:{tmp_path} is not a file.",
    }
    if is_new(acl):
        for path, text in texts.items():
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                interface.InferSession(0, str(path))
        with pytest.raises(RuntimeError, match=r"^empty model path!$"):
            interface.InferSession(0, "")
    else:
        for path in (link, open_to_all, odd):
            interface.InferSession(0, str(path))


def test_files_and_chips_that_do_not_fit_are_a_code(
    interface: Any, static: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    corrupt = tmp_path / "corrupt.om"
    corrupt.write_bytes(b"noise")
    corrupt.chmod(0o640)
    with pytest.raises(RuntimeError, match=r"^\[1\]\[ACL: invalid parameter\] $"):
        interface.InferSession(0, str(corrupt))
    monkeypatch.setenv("FAKE_SOC", "Ascend910B3")
    with pytest.raises(RuntimeError, match=r"^\[1\]\[ACL: invalid parameter\] $"):
        interface.InferSession(0, static)
    assert printed(capfd).count("[ERROR] load model from file failed") == 2
    with pytest.raises(RuntimeError, match=r"^\[507033\]\[Error code unknown\] $"):
        interface.InferSession(7, static)


def test_its_context_stays_in_the_thread_that_called(acl: Any, interface: Any, static: str) -> None:
    before = acl.STATE.context
    session = interface.InferSession(0, static)
    after = acl.STATE.context
    acl.STATE.context = before
    session.infer([half(2)])
    assert before != after == acl.STATE.context


def test_times_are_pairs_or_single_numbers(acl: Any, interface: Any, static: str) -> None:
    session = interface.InferSession(0, static)
    session.infer([half(2)])
    (entry,) = session.summary().exec_time_list
    assert isinstance(entry, tuple) == is_new(acl)
    session.reset_summaryinfo()
    assert session.summary().exec_time_list == []


def test_only_the_newer_generation_can_be_told_by_its_modules(acl: Any, interface: Any) -> None:
    assert hasattr(interface.InferSession, "set_context") == is_new(acl)
    assert (importlib.util.find_spec("ais_bench.infer.interface_check") is not None) == is_new(acl)
