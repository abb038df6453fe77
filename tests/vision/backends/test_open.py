"""A spec names an encoder in plain values; what it opens is the backend for that file."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.vision.backends.om import OmVisionBackend
from llama_adapter.vision.backends.onnx import OnnxVisionBackend
from llama_adapter.vision.backends.open import EncoderSpec, open_encoder
from tests.fakes.exported import make_om
from tests.fakes.foreign_onnx import foreign_onnx

pytestmark = pytest.mark.slow


def test_each_kind_of_file_has_its_backend(acl: Any, tmp_path: Path) -> None:
    onnx = open_encoder(EncoderSpec(kind="onnx", path=str(foreign_onnx(tmp_path / "a.onnx", ("n", 2, 2, 3)))))
    om = open_encoder(EncoderSpec(kind="om", path=str(make_om(tmp_path / "a.om", [1]))))
    assert isinstance(onnx, OnnxVisionBackend)
    assert isinstance(om, OmVisionBackend)
    om.close()


def test_the_device_of_the_spec_is_the_one_that_is_opened(
    acl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DEVICES", "4")
    om = open_encoder(EncoderSpec(kind="om", path=str(make_om(tmp_path / "a.om", [1])), device_id=3))
    assert om.name == "ais_bench (device 3)"
    om.close()


def test_a_spec_can_be_sent_to_another_process() -> None:
    spec = EncoderSpec(kind="om", path="clip.om", device_id=1, own_process=True)
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "mindir", "path": "a"}, "kind must be onnx or om, got 'mindir'"),
        ({"kind": "om", "path": ""}, "path is empty"),
        ({"kind": "om", "path": "a", "device_id": 256}, "from 0 to 255, got 256"),
        ({"kind": "om", "path": "a", "device_id": True}, "from 0 to 255, got True"),
        ({"kind": "onnx", "path": "a", "threads": 0}, "at least 1, got 0"),
    ],
)
def test_a_senseless_spec_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EncoderSpec(**values)
