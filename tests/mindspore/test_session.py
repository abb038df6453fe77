"""MindSpore's session: devices, options, processes, and its effects on the surrounding process."""

import functools
import logging
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import mindspore
import numpy as np
import pytest

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs import mindspore_session
from llama_adapter.runtime.graphs.ge_config import read_ge_config
from llama_adapter.runtime.graphs.mindir_runtime import MindirRuntime
from llama_adapter.runtime.graphs.process_session import ProcessSession
from tests.mindspore.models import encoder, exported, graph
from tests.parity.golden import GENERATE, pixels

PICTURES = GENERATE["bias_b3_mixed"]["images"]
WITHOUT_TORCH = """
import sys
from llama_adapter import Captioner
with Captioner.load(decoder=sys.argv[1]) as captioner:
    [answer] = captioner.generate_text(["a small red star"], max_new_tokens=2)
print(captioner.info.device, len(answer.token_ids), sorted({"torch", "onnxruntime"} & sys.modules.keys()))
"""


def test_a_process_answers_without_torch() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(exported())], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "mindspore (CPU) 2 []\n"
    assert ran.stderr == ""


def test_a_graph_runs_in_a_process_of_its_own() -> None:
    path = graph("encoder")
    pixels_BHWC = pixels(PICTURES[:2]).numpy()
    with closing(ProcessSession(functools.partial(MindirRuntime().open, path), file=str(path))) as session:
        assert np.array_equal(session.run([pixels_BHWC])[0], encoder().run([pixels_BHWC])[0])
        assert session.info.card == encoder().info.card


def test_a_closed_session_and_a_missing_device_are_errors() -> None:
    path = graph("prefix")
    session = MindirRuntime().open(path)
    session.close()
    with pytest.raises(GraphError):
        session.run([np.zeros((1, 10, 192), np.float32)])
    with pytest.raises(GraphError) as failure:
        MindirRuntime(is_ascend=True).open(path)
    assert "Ascend 0" in failure.value.message


def test_options_of_the_graph_engine_reach_the_context() -> None:
    """Uses a recorder, because MindSpore accepts these options only if the chip's libraries are installed."""
    calls: list[Any] = []
    recorder = SimpleNamespace(
        get_current_device=lambda: ("CPU", 0),
        set_device=lambda *given: calls.append(given),
        set_context=lambda **given: calls.append(given),
    )
    config = read_ge_config(exported() / "config.ini")
    mindspore_session._set_device(recorder, "Ascend", device_id=1, config=config)
    options = {"session": config.sections["ge_session_options"]}
    assert calls == [("Ascend", 1), {"ascend_config": {"ge_options": options}}]


def test_mode_and_log_of_mindspore_stay_as_they_were() -> None:
    logger = logging.getLogger("MindSpore")
    before = mindspore.get_context("mode"), logger.level
    encoder().run([pixels(PICTURES[:1]).numpy()])
    assert (mindspore.get_context("mode"), logger.level) == before
