"""The Scores tab: reports written by `eval` are read or refused; their texts stay text."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.learning.scores.compare import compare
from llama_adapter.app.learning.scores.intervals import Draws
from llama_adapter.app.learning.scores.report import as_json, thumbnail_of
from llama_adapter.app.learning.scores.scoring import score
from llama_adapter.app.serving.online.service import Service
from llama_adapter.app.serving.web import scores as tab
from llama_adapter.app.serving.web.page import build_page
from llama_adapter.app.serving.web.scores import SavedReport, read_report, report_html
from llama_adapter.runtime.errors import UsageError
from tests.app.golden import model_options
from tests.app.learning.scores.test_report import EVIL, Page, asked
from tests.app.serving.online.waiting import started

SAMPLE = "assets/pictures/12-red-star.jpg"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a report that has a comparison, a picture and a hostile text."""
    one, other = asked("++-++-++++-+", name=EVIL), asked("+++++++++---", name=EVIL)
    scores = score(other, model=EVIL, draws=Draws(count=20))
    comparison = compare(one, other, names=(EVIL, "trained"), draws=Draws(count=20))
    text = as_json(scores, comparison, pictures=[thumbnail_of(SAMPLE)] * len(scores.worst))
    (tmp_path / "scores.json").write_text(text)
    return tmp_path


def test_a_report_is_shown_whole_and_its_texts_stay_text(folder: Path) -> None:
    report = read_report(str(folder))
    page = Page(report_html(report))

    assert report.scores.num_examples == 12
    assert {tag for tag, _ in page.tags} <= {
        *("div", "section", "h2", "h3", "p", "table", "thead", "tbody", "tr", "th", "td"),
        *("figure", "img", "figcaption", "span", "b", "bdi", "small"),
    }
    assert sum(tag == "img" for tag, _ in page.tags) == len(report.scores.worst) == 3
    assert sum(tag == "bdi" for tag, _ in page.tags) >= 2 * 3  # the answer and the right one of each
    assert "McNemar's exact test" in page.words
    assert "<script>alert('x')</script>" in page.words


def change(report: dict[str, Any], key: str, value: Any) -> str:
    return json.dumps({**report, key: value})


def test_other_files_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "scores.json"
    good = json.loads(path.read_text())
    worst = good["worst"][0]
    for text in (
        "",
        "[]",
        change(good, "format", "x"),
        change(good, "version", 2),
        change(good, "num_examples", "many"),
        change(good, "pictures", ["https://example.com/a.jpg"]),
        change(good, "pictures", ['data:image/jpeg;base64,AA=="onerror="alert(1)']),
        change(good, "worst", [{**worst, "outcome": {**worst["outcome"], "references": []}}]),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"scores\.json"):
            read_report(str(folder))
    monkeypatch.setattr(tab, "MAX_REPORT_BYTES", 10)
    with pytest.raises(UsageError, match="at most 10 bytes"):
        read_report(str(folder))
    path.unlink()
    with pytest.raises(UsageError, match=r"has no scores\.json"):
        read_report(str(folder))


@pytest.mark.slow
def test_the_page_has_a_tab_for_reports_where_there_are_some(folder: Path) -> None:
    # Runs in an event loop; otherwise Gradio opens one.
    async def config(*reports: SavedReport, service: Service | None = None) -> dict[str, Any]:
        service = service or Service(Captioner.load)
        page: dict[str, Any] = build_page(service, samples=[], reports=reports).get_config_file()
        return page

    def tabs(config: dict[str, Any]) -> list[str]:
        return [one["props"]["label"] for one in config["components"] if one["type"] == "tabitem"]

    assert tabs(asyncio.run(config())) == ["Chat", "Batch", "Throughput", "About"]
    shown = asyncio.run(config(read_report(str(folder))))
    assert tabs(shown) == ["Chat", "Batch", "Throughput", "Speed", "Scores", "About"]
    assert any(one["props"].get("elem_id") == "scores-report-0" for one in shown["components"])

    alone = {"llama_dir": model_options()["llama_dir"], "llama_type": "TINY"}
    with started(Service(lambda: Captioner.load(**alone))) as service:
        shown = asyncio.run(config(read_report(str(folder)), service=service))
    assert tabs(shown) == ["Chat", "Scores", "About"], "a LLaMA alone sees no pictures"
    assert any(one["props"].get("elem_id") == "scores-report-0" for one in shown["components"])
