"""The registry: built-in tasks, and tasks added by packages."""

import logging
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llama_adapter import Captioner, UsageError, get_task, tasks
from llama_adapter.app.captioning.tasks.registry import GROUP, installed
from llama_adapter.app.jobs.records.record import read_records
from tests.app.command import Run
from tests.app.golden import ROOT

EXAMPLE = ROOT / "docs" / "example-task"
SAMPLE = str(ROOT / "assets" / "pictures" / "02-red-star-purple-star-white-circle.png")
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts modules on the path, with the metadata that pip writes for a package."""

    def install(package: str, points: dict[str, str], **modules: str) -> None:
        metadata = tmp_path / f"{package}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = "\n".join(f"{name} = {target}" for name, target in points.items())
        (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}\n")
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        installed.cache_clear()

    yield install
    installed.cache_clear()
    for name in ("counting", "broken_task", "taken_task", "loud_task"):
        sys.modules.pop(name, None)


@pytest.fixture
def counting(install: Install) -> None:
    """Install the example."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    points = project["entry-points"][GROUP]
    install("llama_adapter_counting", points, counting=(EXAMPLE / "counting.py").read_text())


def test_tasks_say_what_they_take_and_answer(run: Run) -> None:
    assert [task.name for task in tasks()] == ["caption", "ask", "choose", "text_generation"]
    assert [line.partition(":")[0] for line in run("tasks").out.splitlines()] == [task.name for task in tasks()]
    assert [get_task(task.name) for task in tasks()] == list(tasks())
    assert [task.name for task in tasks() if not task.needs_picture] == ["text_generation"]
    with pytest.raises(UsageError) as error:
        get_task("generate")
    assert all(task.name in error.value.hint for task in tasks())


@pytest.mark.usefixtures("counting")
def test_a_package_adds_a_task_to_the_command_line_and_to_python(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"

    assert "what to count" in run("count", "--help").out
    assert run("count", SAMPLE).code == 2
    common = ["count", SAMPLE, "--out", str(out), "--reader", "thread"]
    assert [run(common, "--things", things).code for things in ("objects", "stars")] == [0, 0]
    assert "1 answered by an earlier run" in run(common, "--things", "objects").err

    record, other = read_records(out)
    assert record["id"] != other["id"]
    assert record["choice"] is not None
    assert set(record["choice"]) == {"zero", "one", "two", "three"}
    question = get_task("count").question({"things": "objects"})
    with Captioner.load() as captioner:
        answer = captioner.ask(SAMPLE, question.prompt(""), task=question.task)
    assert (record["text"], record["mean"]) == (answer.text, answer.details["mean"])  # type: ignore[typeddict-item]
    assert answer.text == "three"
    assert 2.5 < answer.details["mean"] <= 3


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("broken_task:TASK", "raise RuntimeError('it does not start')"),
        ("broken_task:TASK", "raise SystemExit(0)"),
        ("broken_task:NOTHING", ""),
        ("broken_task:TASK", "TASK = 5"),
        ("missing_module:TASK", ""),
        ("broken_task:TASK", "from llama_adapter.app.captioning.tasks.free_text import CAPTION as TASK"),
        (
            "broken_task:TASK",
            "import dataclasses; from llama_adapter.app.captioning.tasks.choose import CHOOSE\n"
            "TASK = dataclasses.replace(CHOOSE, name='other', command='other')",
        ),
    ],
)
@pytest.mark.usefixtures("counting")
def test_a_broken_task_is_named_and_stops_no_other(
    install: Install, target: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    install("broken_package", {"broken": target}, broken_task=text)

    with caplog.at_level(logging.WARNING):
        names = [task.name for task in tasks()]

    assert names == ["caption", "ask", "choose", "text_generation", "count"]
    (record,) = caplog.records
    assert "`broken` of the package `broken_package`" in record.getMessage()


@pytest.mark.parametrize("command", [["tasks"], ["completion", "bash"]])
@pytest.mark.usefixtures("counting")
def test_every_command_loads_packages_and_what_they_print_is_not_among_the_answers(
    command: list[str], install: Install, run: Run
) -> None:
    install("loud_package", {"loud": "loud_task:COUNT"}, loud_task="print('loud'); from counting import COUNT")

    ran = run(command)

    assert ("loud" in ran.out, "loud" in ran.err) == (False, True)


@pytest.mark.parametrize(("command", "flag"), [("serve", "--things"), ("things", "--device")])
@pytest.mark.usefixtures("counting")
def test_a_task_whose_command_or_flag_is_taken_stops_no_other(
    install: Install, run: Run, command: str, flag: str
) -> None:
    text = (EXAMPLE / "counting.py").read_text()
    for mine, theirs in (
        ('name="things"', 'name="stuff"'),
        ("count_things", "stuff"),
        ('name="count", command="count"', f'name="taken", command="{command}"'),
        ("--things", flag),
    ):
        assert mine in text
        text = text.replace(mine, theirs)
    install("taken_package", {"taken": "taken_task:COUNT"}, taken_task=text)

    ran = run("tasks")

    assert ran.code == 0
    assert "task `taken`" in ran.err
