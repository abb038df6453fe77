"""Gradio is imported without the stub files that it otherwise writes into its own folder."""

import inspect
from pathlib import Path
from unittest import mock

import gradio as gr
import pytest
from gradio.component_meta import create_or_modify_pyi

from llama_adapter.app.serving.web import no_stub_files


def test_no_stub_files_are_written_and_other_sources_are_found() -> None:
    with mock.patch.object(Path, "read_text", side_effect=AssertionError("a stub file is made")):
        with no_stub_files():
            create_or_modify_pyi(gr.Button, "Button", [])
            assert inspect.getfile(Path) == str(Path(inspect.__file__).with_name("pathlib.py"))
        with pytest.raises(AssertionError, match="a stub file"):  # otherwise this test would prove nothing
            create_or_modify_pyi(gr.Button, "Button", [])
