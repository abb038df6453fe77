"""The exported encoder in onnxruntime: torch's numbers for any number of pictures, and refused files."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from llama_adapter.runtime.errors import GraphError, UsageError
from llama_adapter.runtime.graphs.card import METADATA_KEY, Port
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.onnx_provider import CPU, KINDS, OnnxProvider, provider_of_device
from llama_adapter.runtime.graphs.onnx_session import open_inference_session
from llama_adapter.runtime.graphs.seal import SEAL_KEY, blank_seal, check_seal, seal
from llama_adapter.runtime.graphs.session import check_outputs
from tests.fakes.exported import embedded_encoder, embedded_onnx, open_onnx, query_limit, sample_pixels, sample_queries
from tests.fakes.foreign_onnx import foreign_onnx

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.proves("visual query of the reference", "ONNX")
@pytest.mark.proves("embedded model", "ONNX")
@pytest.mark.proves("float32", "ONNX")
def test_all_sample_pictures_get_the_visual_query_of_torch(dtype: Any) -> None:
    backend = open_onnx(embedded_onnx(dtype))

    queries = backend.encode(sample_pixels())

    assert queries.dtype == dtype
    assert queries.shape == sample_queries().shape
    assert float((torch.from_numpy(queries).float() - sample_queries()).abs().max()) <= query_limit(dtype)
    assert 3.0 < float(sample_queries().abs().max()) < 4.5  # README: 3.7
    assert len(queries) == 32
    assert backend.card is not None
    assert (backend.card.name, backend.card.dtype) == ("embedded", dtype)
    assert backend.card.vision == embedded_encoder().config


@pytest.mark.proves("any number of pictures", "ONNX")
def test_a_foreign_file_with_a_fixed_batch_runs_any_number_of_pictures(tmp_path: Path) -> None:
    backend = open_onnx(foreign_onnx(tmp_path / "a.onnx", (4, 2, 2, 3), output_shape=(4, 2, 3)))
    pixels = np.arange(7 * 12, dtype=np.uint8).reshape(7, 2, 2, 3)

    queries = backend.encode(pixels)

    expected = pixels.reshape(7, -1).mean(axis=1)[:, None] * np.arange(1, 7)
    assert np.allclose(queries.reshape(7, 6), expected)
    assert (backend.card, backend.batch_sizes, backend.image_size) == (None, (4,), 2)
    free = open_onnx(foreign_onnx(tmp_path / "b.onnx", ("n", 2, 2, 3)))
    assert free.batch_sizes is None
    assert np.allclose(free.encode(pixels).reshape(7, 6), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": ("n", 3, 2, 2)}, "NCHW"),
        ({"shape": ("n", "h", "w", 3)}, r"float32 \(any, any, any, 3\)"),
        ({"shape": ("n", 2, 4, 3)}, r"float32 \(any, 2, 4, 3\)"),
        ({"shape": ("n", 12)}, r"float32 \(any, 12\)"),
        ({"shape": ("n", 2, 2, 3), "dtype": "uint8"}, "uint8"),
        ({"shape": ("n", 2, 2, 3), "outputs": 2}, "query1"),
        ({"shape": ("n", 2, 2, 3), "output_shape": ("n", 6)}, r"float32 \(any, 6\)"),
        ({"shape": ("n", 2, 2, 3), "metadata": {METADATA_KEY: "{}"}}, "card of"),
        ({"shape": (0, 2, 2, 3), "output_shape": (0, 2, 3)}, "empty batch"),
        ({"shape": (10**12, 2, 2, 3), "output_shape": (10**12, 2, 3)}, "1,000,000,000,000"),
    ],
)
def test_a_file_that_is_not_an_encoder_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = foreign_onnx(tmp_path / "foreign.onnx", **changes)
    with pytest.raises(GraphError, match=words) as caught:
        open_onnx(file)
    assert str(file) in caught.value.message


@pytest.mark.parametrize(
    ("pixels", "words"),
    [
        (np.zeros((1, 3, 224, 224), dtype=np.uint8), r"given uint8 \(1, 3, 224, 224\)"),
        (np.zeros((1, 224, 224, 3), dtype=np.int32), r"given int32 \(1, 224, 224, 3\)"),
        (np.zeros((224, 224, 3), dtype=np.uint8), r"given uint8 \(224, 224, 3\)"),
        (np.zeros((1, 336, 336, 3), dtype=np.uint8), r"given uint8 \(1, 336, 336, 3\)"),
        (np.zeros((0, 224, 224, 3), dtype=np.uint8), r"given uint8 \(0, 224, 224, 3\)"),
    ],
)
def test_other_pixels_are_refused(pixels: np.ndarray, words: str) -> None:
    backend = open_onnx(embedded_onnx())
    with pytest.raises(GraphError, match=words):
        backend.encode(pixels)


def test_a_file_that_is_not_a_graph_is_refused(tmp_path: Path) -> None:
    noise = tmp_path / "noise.onnx"
    noise.write_bytes(b"no graph at all" * 100)
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(embedded_onnx().read_bytes()[:100_000])
    for path, words in (
        (tmp_path / "none.onnx", "does not exist"),
        (tmp_path, "is not a file"),
        (noise, "cannot open"),
        (cut, "cannot open"),
        (Path("clip.om"), "is an OM file by its name"),
    ):
        with pytest.raises(GraphError, match=words):
            open_onnx(path)


def test_a_card_must_fit_its_graph(tmp_path: Path) -> None:
    card = open_onnx(embedded_onnx()).card
    assert card is not None
    file = foreign_onnx(tmp_path / "a.onnx", ("n", 2, 2, 3), metadata={METADATA_KEY: card.to_graph().to_json()})
    with pytest.raises(GraphError, match=r"says \(10, 192\) from pictures of 224 pixels"):
        open_onnx(file)


def test_a_failed_call_names_the_file_and_the_arrays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = foreign_onnx(tmp_path / "a.onnx", ("n", 2, 2, 3), only_batch=4)
    with pytest.raises(GraphError, match=r"onnxruntime failed on .*a\.onnx` with float32 \(3, 2, 2, 3\): .*Reshape"):
        open_onnx(file).encode(np.zeros((3, 2, 2, 3), dtype=np.uint8))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "output",
    [np.zeros((1, 9, 192), "f4"), np.zeros((2, 10, 192), "f4"), np.zeros((10, 192), "f4"), np.zeros((1, 10, 192))],
)
def test_a_result_of_another_form_is_refused(output: np.ndarray) -> None:
    promised = Port(name="output", dtype="float32", shape=(-1, 10, 192))
    with pytest.raises(GraphError, match=r"promises float32 \(1, 10, 192\) for a batch of 1, and gave float"):
        check_outputs([output], [promised], batch=1, file="a.onnx")


@pytest.mark.parametrize(
    ("function", "result", "words"),
    [
        ("importlib.util.find_spec", None, "onnxruntime, which is not installed"),
        ("importlib.import_module", ImportError("numpy.core failed"), r"cannot be imported: numpy\.core failed"),
    ],
)
def test_a_missing_or_broken_package_is_an_error_with_the_command_to_install_it(
    function: str, result: Exception | None, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = foreign_onnx(tmp_path / "a.onnx", ("n", 2, 2, 3))
    monkeypatch.setattr(function, Mock(side_effect=result, return_value=None))
    with pytest.raises(GraphError, match=words) as caught:
        open_onnx(file)
    assert caught.value.hint == "in the folder of this project: pip install --editable '.[onnx]'"


def test_a_closed_backend_cannot_run() -> None:
    backend = open_onnx(embedded_onnx())
    for _ in range(2):
        backend.close()
    with pytest.raises(GraphError, match="was closed"):
        backend.encode(sample_pixels()[:1])


@pytest.mark.slow
def test_the_runtime_is_imported_late_and_writes_no_log(tmp_path: Path) -> None:
    file = foreign_onnx(tmp_path / "a.onnx", ("n", 2, 2, 3))
    code = f"""
import os, sys
os.environ.pop("ORT_DISABLE_TELEMETRY", None)
from llama_adapter.runtime.graphs.open_session import GraphSpec, open_session
print([name for name in ("torch", "onnxruntime", "onnx", "ais_bench", "aclruntime") if name in sys.modules])
open_session(GraphSpec(kind="onnx", path={str(file)!r}, threads=1))
print(os.environ["ORT_DISABLE_TELEMETRY"], "onnxruntime" in sys.modules, "torch" in sys.modules)
"""
    home = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    (tmp_path / "home").mkdir()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=home)
    assert result.stdout == "[]\n1 True False\n"
    assert list((tmp_path / "home").iterdir()) == []


def test_a_damaged_graph_prints_nothing_on_stdout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """onnxruntime prints that it retries with the same provider if an error is a RuntimeError."""
    whole = onnx.load(foreign_onnx(tmp_path / "whole.onnx", ("n", 2, 2, 3)))
    whole.graph.node[0].op_type = "Nonsense"
    whole.graph.node[1].input[0] = "nowhere"
    onnx.save(whole, tmp_path / "damaged.onnx")
    external = onnx.load(tmp_path / "whole.onnx")
    name = "external.onnx.data"
    onnx.save(external, tmp_path / "external.onnx", save_as_external_data=True, location=name, size_threshold=0)
    (tmp_path / name).write_bytes(b"")

    for file in ("damaged.onnx", "external.onnx"):
        with pytest.raises(GraphError, match="cannot open"):
            open_onnx(tmp_path / file)

    assert capfd.readouterr() == ("", "")


def test_too_little_memory_gets_a_hint_that_fits_the_batch(tmp_path: Path) -> None:
    def exhaust(_: Any) -> Any:
        raise MemoryError

    for shape, words in (((4, 2, 2, 3), "compiled for a batch of 4"), (("n", 2, 2, 3), "smaller --batch-size")):
        backend: Any = open_onnx(foreign_onnx(tmp_path / "a.onnx", shape, output_shape=(shape[0], 2, 3)))
        backend.session._run = exhaust
        with pytest.raises(GraphError, match="memory is not enough") as caught:
            backend.encode(np.zeros((1, 2, 2, 3), dtype=np.uint8))
        assert words in caught.value.hint


def test_a_card_must_have_the_type_of_its_graph(tmp_path: Path) -> None:
    model = onnx.load(embedded_onnx())
    entry = next(entry for entry in model.metadata_props if entry.key == METADATA_KEY)
    assert '"float32"' in entry.value
    entry.value = entry.value.replace('"float32"', '"float16"')
    file = tmp_path / "a.onnx"
    onnx.save(model, file)
    for read in (open_onnx, read_graph):
        with pytest.raises(GraphError, match="says float16, and its graph is float32"):
            read(file)


@pytest.mark.parametrize("place", [0.25, 0.5, 0.9])
def test_a_file_whose_weights_were_changed_is_refused(tmp_path: Path, place: float) -> None:
    content = bytearray(embedded_onnx().read_bytes())
    content[int(place * len(content))] ^= 1
    (tmp_path / "clip.onnx").write_bytes(content)
    with pytest.raises(GraphError, match=r"clip\.onnx` was changed after its export"):
        open_onnx(tmp_path / "clip.onnx")


def test_external_weights_are_sealed_too(tmp_path: Path) -> None:
    path = tmp_path / "clip.onnx"
    path.write_bytes(b"graph" + SEAL_KEY.encode() + b"\x12\x4a" + blank_seal("clip.onnx.data").encode() + b"end")
    (tmp_path / "clip.onnx.data").write_bytes(b"weights")
    seal(path, weights="clip.onnx.data")
    entry = path.read_bytes().partition(b"\x12\x4a")[2].removesuffix(b"end").decode()

    check_seal(path, entry)
    (tmp_path / "clip.onnx.data").write_bytes(b"others!")
    for wrong in (entry, "", "0" * 64, "x" * 64 + " ../clip.onnx.data", entry[:-5]):
        with pytest.raises(GraphError, match="was changed after its export"):
            check_seal(path, wrong)


# Execution providers: chosen by device, with checked options, and never replaced silently

CUDA, CANN = KINDS["cuda"].name, KINDS["npu"].name
INI = f"""
[{CANN}]
npu_mem_limit = 8589934592  ; bytes
precision_mode = must_keep_origin_dtype
[{CUDA}]
use_tf32 = 0
[session]
session.disable_cpu_ep_fallback = 1
[ascend_context]  # another program's
provider = ge
"""


def test_a_device_chooses_its_provider() -> None:
    assert provider_of_device("cpu") == CPU
    assert provider_of_device("cuda:1") == OnnxProvider(name=CUDA, options={"device_id": "1"})
    assert provider_of_device("npu") == OnnxProvider(name=CANN, options={"device_id": "0"})
    for device in ("1", "gpu:0", "npu:256", "cpu:0", ""):
        with pytest.raises(ValueError, match="wanted cpu"):
            provider_of_device(device)


def test_options_come_from_a_file_and_from_flags_which_win(tmp_path: Path) -> None:
    config = tmp_path / "config.ini"
    config.write_text(INI)
    given = ["precision_mode=force_fp16", "session.set_denormal_as_zero=1"]

    provider = provider_of_device("npu:2", options=given, config=str(config))

    assert provider.options == {"npu_mem_limit": "8589934592", "precision_mode": "force_fp16", "device_id": "2"}
    assert provider.session_entries == {"session.disable_cpu_ep_fallback": "1", "session.set_denormal_as_zero": "1"}
    assert provider_of_device("cuda:0", config=str(config)).options == {"use_tf32": "0", "device_id": "0"}


@pytest.mark.parametrize(
    ("device", "option", "hint"),
    [
        ("npu:0", "optypelist_for_impl_mode=Gelu", "`optypelist_for_implmode` may be meant"),
        ("npu:0", "gpu=1", "known: arena_extend_strategy, device_id, "),
        ("cuda:0", "gpu_memory_limit=1", "`gpu_mem_limit` may be meant"),
        ("cpu", "device_id=0", "known: none"),
        ("cpu", "session.disable_cpu_ep_fallbak=1", "`session.disable_cpu_ep_fallback` may be meant"),
        ("npu:0", "device_id=1", "leave device_id out"),
    ],
)
def test_an_unknown_option_is_refused(device: str, option: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        provider_of_device(device, options=[option])
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[CANExecutionProvider]\ndump_graphs = 1", r"\[CANExecutionProvider\]"),
        ("[ascend_context]\nprovider = ge", r"its sections: \[ascend_context\]"),
        ("", "its sections: none"),
        ("dump_graphs = 1", "no section headers"),
        ("[session]\nsession.x = 1\nsession.x = 2", "already exists"),
        (None, "No such file"),
    ],
)
def test_a_file_that_configures_nothing_is_refused(text: str | None, words: str, tmp_path: Path) -> None:
    config = tmp_path / "config.ini"
    if text is not None:
        config.write_text(text)
    with pytest.raises(UsageError, match=words):
        provider_of_device("npu:0", config=str(config))


def test_a_provider_that_is_not_installed_is_an_error_with_its_wheel(tmp_path: Path) -> None:
    file = foreign_onnx(tmp_path / "a.onnx", ("n", 2, 2, 3))
    for device, packages in (("cuda:0", "onnxruntime-gpu"), ("npu:0", "onnxruntime-cann 'numpy<2'")):
        with pytest.raises(GraphError, match=r"it has .*CPUExecutionProvider") as caught:
            open_inference_session(file, threads=1, provider=provider_of_device(device))
        assert f"pip install {packages} " in caught.value.hint


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_session_that_fell_back_to_the_cpu_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like onnxruntime-gpu without CUDA's libraries, which opens the graph on the CPU and returns a session."""
    file = foreign_onnx(tmp_path / "a.onnx", ("n", 2, 2, 3))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU.name])
    with pytest.raises(GraphError, match=f"{CUDA} .*device 1: it opened the graph with CPUExecutionProvider"):
        open_inference_session(file, threads=1, provider=provider_of_device("cuda:1"))


def test_session_entries_reach_the_session(tmp_path: Path) -> None:
    file = foreign_onnx(tmp_path / "a.onnx", ("n", 2, 2, 3))
    provider = provider_of_device("cpu", options=["session.set_denormal_as_zero=1"])

    session: Any = open_inference_session(file, threads=1, provider=provider)

    options = session.get_session_options()
    assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
