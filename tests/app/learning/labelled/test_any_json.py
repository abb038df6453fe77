"""Any JSON data gives examples, problems or an InputsError, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.pictures.inputs import InputsError
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS

_NAMES = (
    *(
        "picture",
        "image",
        "question",
        "questions",
        "input",
        "answer",
        "answers",
        "label",
        "caption",
        "choices",
        "split",
    ),
    *("part", "text", "id", "image_id", "question_id", "file_name", "hint", "subject", "answer_type"),
)
_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("\ud800")
_values = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
_entries = st.dictionaries(st.sampled_from(_NAMES), _values | st.dictionaries(st.sampled_from(_NAMES), _values))
_lists = st.lists(_entries, max_size=4)
_data = st.one_of(
    _values,
    _lists,
    st.dictionaries(st.sampled_from(("questions", "annotations", "images")), _lists | _values),
    st.dictionaries(st.sampled_from("123"), _entries | _values),
)


# A table, and the benchmarks' files, which are recognised by name.
_FILES = (
    "table.json",
    "coco_pope_random.json",
    "v2_OpenEnded_mscoco_val2014_questions.json",
    "captions_val2014.json",
    "problems.json",
)
_SECOND_FILE = "v2_mscoco_val2014_annotations.json"  # read together with the questions


@pytest.mark.slow
@given(data=_data)
def test_no_json_is_more_than_refused(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """All files get the same data in turn, because creating them takes longer than reading them."""
    folder = Path(tmp_path_factory.getbasetemp() / "any-json")
    folder.mkdir(exist_ok=True)
    for file in (*_FILES, _SECOND_FILE):
        (folder / file).write_text(json.dumps(data))
    for file in _FILES:
        try:
            found = read_examples(str(folder / file))
        except InputsError:
            continue
        assert all(
            example.answers and (example.task == "choice") == (example.choices is not None)
            for example in found.examples
        ), file
        assert not any(UNSAFE_ON_TERMINALS.search(str(problem)) for problem in found.problems), file
