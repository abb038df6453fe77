"""The embedded model's card: its figures, and how results are added."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.common import DOCS
from scripts.pages.render import read
from scripts.train_embedded.card import main, put_scores


def test_the_scores_are_those_of_the_model_in_the_repository() -> None:
    manifest = json.loads((DOCS.parent / "assets" / "embedded" / "manifest.json").read_text(encoding="utf-8"))

    assert read("embedded-model")["scores"]["float32"]["model"] == manifest["digest"]


def scored(**changes: Any) -> dict[str, Any]:
    return {**read("embedded-model")["scores"]["int8"], **changes}


def test_results_are_put_into_the_figures_and_the_page_is_written(tmp_path: Path) -> None:
    (tmp_path / "embedded-model.json").write_text(json.dumps(read("embedded-model")))
    (tmp_path / "int8.json").write_text(json.dumps(scored(scores=dict.fromkeys(scored()["scores"], 12.3))))
    (tmp_path / "table.json").write_text('{"heads": ["kind", "AUC"], "rows": [["a|b", 0.98760]]}')
    flags = ["--scores", f"int8={tmp_path / 'int8.json'}", "--familiar", str(tmp_path / "table.json")]

    assert main(["--out", str(tmp_path), *flags]) == 0

    page = (tmp_path / "embedded-model.md").read_text(encoding="utf-8")
    assert f"| caption | {scored()['asked']['caption']} | 100.0 | 12.3 |" in page
    assert "| kind | AUC |\n| --- | --- |\n| a\\|b | 0.9876 |\n" in page


@pytest.mark.parametrize(("name", "changes"), [("int8", {"seed": 3}), ("int8", {"asked": {}}), ("int4", {})])
def test_scores_that_cannot_be_compared_are_refused(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    path = tmp_path / "figures.json"
    put_scores(path, "float32", scored())

    with pytest.raises(ValueError, match=f"asked|{name}"):
        put_scores(path, name, scored(**changes))
    assert json.loads(path.read_text())["scores"].keys() == {"float32"}
