"""Every way in which torch_npu cannot be had ends in one error with a hint; here, packages that do nothing but fail."""

import sys
from pathlib import Path

import pytest
import torch

from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.devices.npu_load import load_torch_npu
from llama_adapter.runtime.errors import DeviceError
from tests.npu import wheel


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a torch_npu with the given source, and version if any, on the path."""

    def install(source: str, *, version: str | None = None) -> None:
        (tmp_path / "torch_npu.py").write_text(source, encoding="utf-8")
        if version:
            info = tmp_path / f"torch_npu-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    sys.modules.pop("torch_npu", None)


def failure() -> DeviceError:
    with pytest.raises(DeviceError) as caught:
        load_torch_npu()
    return caught.value


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        (
            "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')",
            "the libraries of CANN are not found",
            "set_env.sh",
        ),
        (
            "raise Exception('ASCEND_HOME_PATH : /opt/x does not exist. Please run set_env.sh')",
            "environment variables of CANN lead nowhere",
            "again",
        ),
        (
            "raise RuntimeError('Two accelerators cannot be used at the same time in PyTorch: npu and cuda')",
            "built for another accelerator",
            "CPU build",
        ),
        (
            "raise ImportError('/x/libtorch_npu.so: undefined symbol: _ZN3c10')",
            "fit neither this torch",
            "compatibility table",
        ),
        (
            "raise RuntimeError('Only a single TORCH_LIBRARY can be used to register the namespace npu')",
            "failed to load earlier",
            "start again",
        ),
        ("import no_such_package", "a Python package that it needs", "extra `npu`"),
        ("raise OSError('out of luck')", "cannot be imported (OSError: out of luck)", "doctor"),
    ],
)
def test_a_torch_npu_that_fails_to_load_is_explained(installed, source: str, message: str, hint: str) -> None:
    installed(source)

    error = failure()

    assert message in error.message
    assert hint in error.hint
    assert "--device cpu" in error.hint
    quoted = source.partition("'")[2].rstrip("')") or "No module named 'no_such_package'"
    assert quoted in error.message


def test_a_torch_npu_for_another_torch_is_not_even_loaded(installed) -> None:
    installed("raise SystemExit('loaded')", version="2.1.0.post13")

    error = failure()

    assert (
        f"torch_npu 2.1.0.post13 is made for torch 2.1.0, and torch {torch.__version__} is installed" in error.message
    )


@pytest.mark.skipif("torch_npu" in sys.modules, reason="torch_npu is installed here")
def test_without_torch_npu_the_device_says_what_to_install() -> None:
    with pytest.raises(DeviceError) as caught:
        open_backend("npu:0")

    assert "torch_npu is not installed" in caught.value.message
    assert "`npu`" in caught.value.hint


def test_what_torch_npu_prints_while_loading_stays_out_of_the_answers(installed, capsys) -> None:
    installed("print('Warning: ASCEND_HOME_PATH environment variable is not set.')")

    load_torch_npu()

    printed = capsys.readouterr()
    assert printed.out == ""
    assert "ASCEND_HOME_PATH" in printed.err


@pytest.mark.parametrize(("kind", "version"), [("cuda", "13.0"), ("hip", "7.0")])
def test_the_wheel_is_not_tried_on_a_torch_that_it_refuses(
    kind: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, kind, version)

    with pytest.raises(wheel.UnavailableError, match=rf"built for another accelerator \({version}\)|has no wheel"):
        wheel.fake_npu.__wrapped__()
