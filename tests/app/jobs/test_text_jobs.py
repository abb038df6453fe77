"""`generate`: prompts without a picture, from flags and files."""

import json
import sys
from pathlib import Path

import pytest

from llama_adapter import Captioner, RawPrompt
from llama_adapter.app.captioning.captioner import Prompt
from llama_adapter.app.jobs.records.record import read_records
from tests.app.command import Run
from tests.app.golden import GOLDEN, model_flags, model_options

pytestmark = pytest.mark.usefixtures("models_placed_once")

COMMON = [*model_flags(), "--max-new-tokens", "6"]
LLAMA = ["--llama-dir", str(GOLDEN / "LLaMA"), "--llama-type", "TINY", "--max-new-tokens", "6"]


def expected(*prompts: Prompt) -> list[str]:
    with Captioner.load(**model_options()) as captioner:
        return [answer.text for answer in captioner.generate_text(list(prompts), max_new_tokens=6)]


def written(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return str(tmp_path / name)


def test_a_prompt_is_answered_as_in_python(run: Run) -> None:
    plain, raw, paired = expected("Is {it} red?", RawPrompt("Once"), ("Sum up.", "Two words"))

    assert [record["text"] for record in run("generate", "--prompt", "Is {it} red?", COMMON).records] == [plain]
    assert run("generate", "--prompt", "Once", "--raw", COMMON, "--format", "text").out == f"{raw}\n"
    assert run("generate", "--prompt", "Sum up.", "--input", "Two words", COMMON).records[0]["text"] == paired
    several = run("generate", "--prompt", "Once", "--prompt", "Is {it} red?", "--raw", COMMON).records
    assert {record["prompt"] for record in several} == {"Once", "Is {it} red?"}
    assert raw in [record["text"] for record in several]
    assert run("generate", "--prompt", "Hello", LLAMA).code == 0


def test_several_answers_with_the_log_probabilities_of_their_tokens(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path, "p.txt", "Why?\nName a colour.\n")
    asked = ["--prompt-file", file, COMMON, "--temperature", "1", "--seed", "5", "--logprobs", "2"]
    out = tmp_path / "answers.jsonl"
    assert "4 answers given in" in run("generate", *asked, "--n", "2", "--out", str(out)).err
    assert "2 answers given, 4 given by an earlier run" in run("generate", *asked, "--n", "3", "--out", str(out)).err
    records = list(read_records(out))

    with Captioner.load(**model_options()) as captioner:
        options = {"max_new_tokens": 6, "temperature": 1.0, "seed": 5, "n": 3, "logprobs": 2}
        answers = captioner.generate_text(["Why?", "Name a colour."], **options)  # type: ignore[arg-type]
    wanted = {(answer.prompt, answer.index % 3): answer for answer in answers}
    found = {(record["prompt"], record.get("number", 0)): record for record in records}
    assert len(records) == len(found) == 6, "the second run adds the third answer"
    assert found.keys() == wanted.keys()
    assert len({answer.text for answer in answers[:3]}) > 1
    for key, record in found.items():
        assert record["text"] == wanted[key].text
        for one, token in zip(record["logprobs"], wanted[key].logprobs, strict=True):
            assert (one["token"], one["logprob"]) == (token.text, pytest.approx(token.logprob, rel=1e-5))
            assert [other["token"] for other in one["top_logprobs"]] == [text for text, _ in token.top]


def test_rows_are_answered_in_a_context_that_the_template_fills(run: Run, tmp_path: Path) -> None:
    rows = written(tmp_path, "p.txt", f"Once\n{'long ' * 200}\n")
    ran = run("generate", "--prompt-file", rows, "--raw", LLAMA, "--context", "24")
    assert ran.code == 3
    assert [record["error"] is None for record in sorted(ran.records, key=lambda one: one["picture"])] == [True, False]


def test_malformed_rows_get_records_and_stop_nothing(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    rows = [
        '{"prompt": "Name a colour."}',
        '{"prompt": ',
        '{"prompt": 5}',
        '{"text": "no prompt"}',
        '["a list"]',
        json.dumps({"prompt": "long " * 600}),
        '{"input": "Is it?"}',
    ]
    file = written(tmp_path, "p.jsonl", "\n".join(rows))
    command = ["generate", "--prompt-file", file, *COMMON, "--out", str(out)]

    first, second = run(*command), run(*command)

    records = {record["picture"].removeprefix(file): record for record in read_records(out)}
    assert (first.code, second.code) == (3, 3)
    assert {name for name, record in records.items() if record["error"] is None} == {"#1"}
    assert {record["error"]["code"] for record in records.values() if record["error"] is not None} == {"prompt"}
    assert sorted(records) == ["#1", "#6", "#7", ":2", ":3", ":4", ":5"]
    assert {records[name]["prompt"] for name in (":2", ":3", ":4", ":5")} == {""}
    assert "0 prompts answered, 1 answered by an earlier run, 6 failed in an earlier run" in second.err
    assert run(*command, "--prompt", "Answer.").code == 3
    rows[1] = '{"prompt": "Is it mended?"}'
    written(tmp_path, "p.jsonl", "\n".join(rows))
    assert "1 prompt answered" in run(*command).err
    assert list(read_records(out))[-1]["supersedes"] == [f"{file}:2"]


def test_rows_may_have_only_an_input_and_choices(run: Run, tmp_path: Path) -> None:
    rows = [{"input": "the sea"}, {"input": "the sky", "choices": ["red", "green"]}]
    file = written(tmp_path, "p.json", json.dumps(rows))

    ran = run("generate", "--prompt-file", file, "--prompt", "Sum up.", COMMON)
    first, second = sorted(ran.records, key=lambda record: record["picture"])

    assert [first["text"]] == expected(("Sum up.", "the sea"))
    assert second["choice"].keys() == {"red", "green"}
    assert run("generate", "--prompt-file", file, COMMON).code == 2


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("caption x.png", "--adapter"),
        ("ask x.png --question a", "--adapter"),
        ("bench", "--adapter"),
        ("generate --prompt a --text-prefix zeros", "text-prefix"),
    ],
)
def test_what_needs_an_adapter_is_refused_for_llama_alone(run: Run, command: str, told: str) -> None:
    ran = run(*command.split(), *LLAMA[:4])

    assert (ran.code, told in ran.err) == (2, True)


def test_what_is_answered_depends_on_the_prefix_and_is_recorded_by_it(run: Run, tmp_path: Path) -> None:
    out = str(tmp_path / "answers.jsonl")
    command = ["generate", "--prompt", "Name a colour.", *COMMON, "--out", out]

    for flags in ([], ["--text-prefix", "zeros"], ["--text-prefix", "none"]):
        assert run(*command, *flags).code == 0

    zeros, none = read_records(out)
    assert zeros["id"] != none["id"]
    assert zeros["text"] != none["text"]


def test_a_single_prompt_appears_on_a_terminal_as_it_is_generated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    pieces: list[str] = []
    monkeypatch.setattr(
        "llama_adapter.app.jobs.result_writer.give", lambda data: pieces.append(data.decode()), raising=True
    )

    run("generate", "--prompt", "Name a colour.", COMMON)

    assert len(pieces) > 3
    assert "".join(pieces) == f"{expected('Name a colour.')[0]}\n"


def test_answers_in_paddlenlps_format_keep_the_target_and_are_those_of_this_file(run: Run, tmp_path: Path) -> None:
    rows = [("Name a colour.", "red"), ("Is it red?", ["no"]), ("Name a colour.", "blue")]
    lines = "\n".join(json.dumps({"src": source, "tgt": target}) for source, target in rows)
    data, made = written(tmp_path, "dev.json", lines), tmp_path / "output.json"
    out = ["--out", str(tmp_path / "output.jsonl"), "--paddlenlp-out", str(made)]
    colour, red = expected("Name a colour.", "Is it red?")
    wanted = [("Name a colour.", "red", colour), ("Is it red?", "no", red), ("Name a colour.", "blue", colour)]

    def found() -> list[tuple[str, ...]]:
        lines = [json.loads(line) for line in made.read_text().splitlines()]
        return [tuple(line[name] for name in ("src", "tgt", "output")) for line in lines]

    assert run("generate", "--prompt-file", data, "--limit", "1", out, COMMON).code == 0
    assert found() == wanted[:1]
    resumed = run("generate", "--prompt-file", data, out, COMMON)
    assert (resumed.code, found()) == (0, wanted)
    assert "1 answered by an earlier run" in resumed.err
    other = written(tmp_path, "b.txt", "Is it red?")
    assert run("generate", "--prompt-file", other, out, COMMON).code == 0
    assert found() == [("Is it red?", "", red)]
    written(tmp_path, "b.txt", "Name a colour.\nIs it red?")
    assert run("generate", "--prompt-file", other, out, COMMON).code == 0
    assert found() == [("Name a colour.", "", colour), ("Is it red?", "", red)]
