"""Reading `config.ini` of MindSpore Lite, and its warnings."""

from pathlib import Path

import pytest

from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.graphs.ge_config import read_ge_config, recommended_ge_config


def test_configurations_are_read_with_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "config.ini"
    path.write_text("# options\n[ascend_context]\nprovider=ge\nplugin_custom_op=All\n[ge_session]\nge.event=notify\n")
    with pytest.warns(UserWarning, match="config.ini") as told:
        config = read_ge_config(path)
    assert [str(one.message).removeprefix(f"`{path}`, ") for one in told] == [
        "line 4: `ascend_context` has no known option `plugin_custom_op`; `plugin_custom_ops` may be meant",
        "line 5: no section `ge_session` is known; `ge_session_options` may be meant",
    ]
    assert config.sections["ge_session"] == {"ge.event": "notify"}


@pytest.mark.parametrize(
    ("text", "line"),
    [("ge.event=1\n", 1), ("[weight]\n[b\n", 2), ("[weight]\n\na=1\na=2\n", 4), ("[weight]\nnothing\n", 2)],
)
def test_lines_that_are_no_options_are_refused(text: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "config.ini").write_text(text)
    with pytest.raises(UsageError) as failure:
        read_ge_config(tmp_path / "config.ini")
    assert f"line {line}" in failure.value.message


def test_the_recommended_options_are_known(tmp_path: Path) -> None:
    (tmp_path / "config.ini").write_text(recommended_ge_config())
    config = read_ge_config(tmp_path / "config.ini")
    assert config.provider == "ge"
    assert config.ge_options == {"session": dict(config.sections["ge_session_options"])}


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "binary.ini").write_bytes(b"\xff\xfe")
    for name in ("missing.ini", "binary.ini"):
        with pytest.raises(UsageError):
            read_ge_config(tmp_path / name)
