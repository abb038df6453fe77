"""Every failure to load torch_npu becomes one error with a hint.

Here torch_npu is replaced by packages that only fail.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.devices.npu_load import load_torch_npu
from llama_adapter.runtime.errors import DeviceError


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a torch_npu with this source, and with this version if given, on the path."""

    def install(source: str, *, version: str | None = None) -> None:
        (tmp_path / "torch_npu.py").write_text(source, encoding="utf-8")
        if version:
            info = tmp_path / f"torch_npu-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    sys.modules.pop("torch_npu", None)


FAILURES = [
    "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')",
    "raise Exception('ASCEND_HOME_PATH : /opt/x does not exist. Please run set_env.sh')",
    "raise RuntimeError('Two accelerators cannot be used at the same time in PyTorch: npu and cuda')",
    "raise ImportError('/x/libtorch_npu.so: undefined symbol: _ZN3c10')",
    "raise RuntimeError('Only a single TORCH_LIBRARY can be used to register the namespace npu')",
    "import no_such_package",
    "raise OSError('out of luck')",
]


def test_a_torch_npu_that_fails_to_load_is_explained(installed, snapshot: SnapshotAssertion) -> None:
    told = []
    for source in FAILURES:
        installed(source)
        with pytest.raises(DeviceError) as caught:
            load_torch_npu()
        told += [source, f"    {caught.value.message}", f"    {caught.value.hint}"]

    assert "\n".join(told).replace(torch.__version__, "VERSION") == snapshot


@pytest.mark.skipif("torch_npu" in sys.modules, reason="torch_npu is installed here")
def test_without_torch_npu_the_error_says_what_to_install() -> None:
    with pytest.raises(DeviceError) as caught:
        open_backend("npu:0")

    assert "torch_npu is not installed" in caught.value.message
    assert "`npu`" in caught.value.hint


def test_a_torch_npu_for_another_torch_is_not_loaded_and_output_while_loading_goes_to_stderr(installed, capsys) -> None:
    installed("print('Warning: ASCEND_HOME_PATH environment variable is not set.')")
    load_torch_npu()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "ASCEND_HOME_PATH" in printed.err

    installed("raise SystemExit('loaded')", version="2.1.0.post13")
    sys.modules.pop("torch_npu")
    made = f"torch_npu 2.1.0.post13 is made for torch 2.1.0, and torch {torch.__version__} is installed"
    with pytest.raises(DeviceError, match=re.escape(made)):
        load_torch_npu()
