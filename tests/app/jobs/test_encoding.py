"""`encode` on one machine and `caption` on another give the records of `caption` alone."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.captioning.captioner import Answer, Captioner, Event
from llama_adapter.app.jobs import encoding
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.jobs.records.record import read_records
from llama_adapter.app.models.bundle import convert
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs.encoded import prefix_inputs
from llama_adapter.app.pictures.prefixes.file import PrefixRow, StoredPicture, read_prefix_file, write_prefixes
from llama_adapter.app.pictures.reading.prefetch import Prefetcher
from tests.app.command import Ran, Run, run_several
from tests.app.exported import exported_embedded, exported_golden
from tests.app.golden import NAMES, ROOT, model_flags, model_options
from tests.parity.exported import golden_onnx

pytestmark = pytest.mark.usefixtures("models_placed_once")

BROKEN = ROOT / "assets" / "broken"
HERE = ["--reader", "thread"]
ENCODER = model_flags()[4:]  # adapter and CLIP, without LLaMA
DECODER = [*model_flags()[:6], "--max-new-tokens", "6"]  # LLaMA and adapter, without CLIP


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(CaptionerSpec(**model_options()), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def encode(run: Run, folder: Path, tmp_path: Path) -> Callable[..., str]:
    """Encodes the pictures of `folder`; returns the folder of prefixes."""

    def encode(*how: str | list[str], name: str = "prefixes") -> str:
        assert run("encode", str(folder), *how, "--out", str(tmp_path / name), HERE).code == 0
        return str(tmp_path / name)

    return encode


def in_order(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sorted records, without the fields that differ between runs."""
    kept = ({name: value for name, value in record.items() if name not in ("ms", "run")} for record in records)
    return sorted(kept, key=lambda record: (record["picture"], record["id"]))


def codes_of(ran: Ran) -> list[str]:
    """The sorted codes of the records' errors; empty for answers."""
    return sorted((record["error"] or {"code": ""})["code"] for record in ran.records)


@pytest.mark.slow
@pytest.mark.proves("prefix files", "CPU")
def test_records_over_prefixes_are_those_over_the_pictures(run: Run, tmp_path: Path) -> None:
    batch = ["--batch-size", "5"]

    def answers(*where: str) -> list[Ran]:
        asked = ["--question", "Is there a star?", "--choices", "Yes,No"]
        return [run("caption", *where, batch), run("ask", *where, asked, batch)]

    pictures = [*map(str, sorted(sample_pictures().glob("*.png"))[:8]), str(BROKEN)]
    over_pictures = answers(*pictures)
    assert [ran.code for ran in over_pictures] == [3, 3]
    for keeps in ([], ["--keys-values"]):
        prefixes = str(tmp_path / f"prefixes{len(keeps)}")
        assert run("encode", pictures, keeps, batch, "--out", prefixes, HERE).code == 3
        over_prefixes = answers(prefixes)

        assert [ran.code for ran in over_prefixes] == [3, 3]
        for ours, theirs in zip(over_prefixes, over_pictures, strict=True):
            assert in_order(ours.records) == in_order(theirs.records)
            assert any("unfamiliar" in record for record in ours.records)
            assert sum(record["error"] is not None for record in ours.records) == 3


def test_a_run_over_prefixes_continues_one_over_the_pictures(
    run: Run, encode: Callable[..., str], folder: Path, bundle: Path, tmp_path: Path
) -> None:
    model, out = ["--model", str(bundle), "--max-new-tokens", "4"], ["--out", str(tmp_path / "answers.jsonl")]
    prefixes = encode("--model", str(bundle))

    run("caption", str(folder), model, out, "--limit", "2")
    rest = run("caption", prefixes, model, out, "--format", "jsonl")
    again = run("caption", str(folder), model, out, "--format", "jsonl")

    assert len(rest.records) == 1
    assert again.records == []


def test_streams_are_those_over_the_pictures(encode: Callable[..., str], folder: Path, bundle: Path) -> None:
    prefixes = encode("--model", str(bundle))

    def shown(events: list[Event]) -> list[tuple[Any, ...]]:
        answers = {event.index: event.picture for event in events if isinstance(event, Answer)}
        parts = ((answers[event.index], event.text) for event in events)
        return sorted(parts, key=lambda part: part[0])

    with Captioner.load(bundle) as whole, Captioner.load(bundle, vision="prefixes", encoder=prefixes) as decoder:
        over_pictures = shown(list(whole.stream(folder, max_new_tokens=6)))
        over_prefixes = shown(list(decoder.stream(prefixes, max_new_tokens=6)))
        refused = [*whole.generate(prefixes), *decoder.generate(folder)]

    assert over_prefixes == over_pictures
    assert {answer.error.code for answer in refused if answer.error} == {"unsupported"}
    assert len(refused) == 6


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "operators"), [("float32", "aten"), ("bfloat16", "auto"), ("float16", "aten")])
def test_every_dtype_and_kind_of_operators_answers_alike(
    dtype: str, operators: str, run: Run, encode: Callable[..., str], folder: Path, bundle: Path
) -> None:
    how = ["--model", str(bundle), "--dtype", dtype, "--operators", operators]
    theirs = run("caption", str(folder), how, "--max-new-tokens", "6")
    for name, keeps in (("queries", []), ("pairs", ["--keys-values"])):
        ours = run("caption", encode(how, keeps, name=name), how, "--max-new-tokens", "6")

        assert in_order(ours.records) == in_order(theirs.records)


@pytest.mark.slow
@pytest.mark.proves("prefix files", "ONNX")
def test_an_exported_encoder_encodes_alone_and_without_torch(
    run: Run, folder: Path, bundle: Path, tmp_path: Path
) -> None:
    prefixes, exported = str(tmp_path / "prefixes"), ["--encoder", str(golden_onnx())]

    unread = model_flags()[:4]  # a LLaMA
    [encoded] = run_several([["encode", str(folder), *unread, *exported, "--out", prefixes, *HERE]])
    alone = run("encode", str(folder), exported, "--out", prefixes + "2")
    ours = run("caption", prefixes, "--model", str(bundle))
    theirs = run("caption", str(folder), "--model", str(bundle), exported)

    assert (encoded.code, "torch" in encoded.modules) == (0, False)
    assert "the embedded model" not in alone.err
    assert in_order(ours.records) == in_order(theirs.records)


@pytest.mark.slow
def test_an_exported_decoder_answers_without_torch(run: Run, tmp_path: Path) -> None:
    pictures = [*map(str, sorted(sample_pictures().glob("*.png"))[:8]), str(BROKEN)]
    decoder, other = (["--decoder", str(exported)] for exported in (exported_embedded(), exported_golden("BIAS-TINY")))
    encoded = {str(tmp_path / "plain"): [], str(tmp_path / "projected"): ["--keys-values"]}
    for prefixes, keeps in encoded.items():
        assert run("encode", pictures, keeps, "--out", prefixes, HERE).code == 3
    theirs = run("caption", pictures, decoder)
    over_prefixes = run_several(["caption", prefixes, *decoder] for prefixes in encoded)
    for ours, prefixes in zip(over_prefixes, encoded, strict=True):
        refused = run("caption", prefixes, other)

        assert (ours.code, theirs.code, "torch" in ours.modules) == (3, 3, False)
        assert in_order(ours.records) == in_order(theirs.records)
        assert (refused.code, refused.out) == (1, "")
        assert "embedded" in refused.err
        assert "BIAS-TINY" in refused.err


def test_another_dtype_gives_records_of_its_own(run: Run, encode: Callable[..., str], bundle: Path) -> None:
    ids = []
    for dtype in ("float32", "bfloat16"):
        prefixes = encode("--model", str(bundle), "--dtype", dtype, name=dtype)
        ran = run("caption", prefixes, "--model", str(bundle), "--dtype", "float32", "--max-new-tokens", "2")
        ids.append({record["id"] for record in ran.records})

    assert ids[0].isdisjoint(ids[1])


# Later runs


def test_a_later_run_encodes_what_is_new_or_changed(run: Run, folder: Path, tmp_path: Path) -> None:
    prefixes = tmp_path / "prefixes"
    command = ["encode", str(folder), *ENCODER, "--out", str(prefixes), *HERE]
    run(command)
    again = run(command, "--format", "jsonl")
    shutil.copy(folder / NAMES[0], folder / "copy.jpg")
    shutil.copy(folder / NAMES[2], folder / NAMES[1])
    more = run(command, "--format", "jsonl")

    assert again.records == []
    assert sorted(Path(record["picture"]).name for record in more.records) == sorted(["copy.jpg", NAMES[1]])
    answers = run("caption", str(prefixes), DECODER).texts()
    assert answers == run("caption", str(folder), model_flags(), "--max-new-tokens", "6").texts()
    assert len(answers) == 4

    over = run(command, "--overwrite", "--format", "jsonl")
    assert len(over.records) == 4
    assert [file.name for file in sorted(prefixes.glob("*.safetensors"))] == ["prefixes-00000.safetensors"]


def test_a_picture_that_moves_has_its_last_name_alone_also_in_records_that_pandas_wrote_again(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    prefixes = tmp_path / "prefixes"
    command = ["encode", str(folder), *ENCODER, "--out", str(prefixes), *HERE]

    def moved(name: str, other: str) -> list[str]:
        """The names of the encoded pictures after a picture was renamed and all were encoded again."""
        (folder / name).rename(folder / other)
        assert run(command, "--format", "jsonl").records == []
        return sorted(Path(item.label).name for item in prefix_inputs(str(prefixes)))

    first, *others = NAMES
    run(command)
    assert moved(first, "moved.jpg") == sorted(["moved.jpg", *others])
    assert moved("moved.jpg", first) == sorted(NAMES)
    assert moved(first, "moved.jpg") == sorted(["moved.jpg", *others])

    shutil.copy(BROKEN.parent / "pictures" / "12-red-star.jpg", folder / first)  # another picture of the former name
    assert len(run(command, "--format", "jsonl").records) == 1
    before = list(prefix_inputs(str(prefixes)))
    assert sorted(Path(item.label).name for item in before) == sorted(["moved.jpg", *NAMES])

    records = prefixes / "part-00000.jsonl"
    rewritten = [
        {"moved_from": None, **record, "row": float(record["row"]), "transparent": 1.0}
        for record in map(dict, read_records(records))
    ]
    records.write_text("".join(json.dumps(record) + "\n" for record in rewritten))
    after = list(prefix_inputs(str(prefixes)))
    assert [item.label for item in after] == [item.label for item in before]
    for item, was in zip(after, before, strict=True):
        assert item.source == dataclasses.replace(was.source, notes=("transparent",))
    assert run(command, "--format", "jsonl").records == []


def test_a_folder_of_answers_or_that_lacks_files_is_refused_before_the_encoder_is_opened(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes, answers = tmp_path / "prefixes", tmp_path / "answers"
    command = ["encode", str(folder), *ENCODER, *HERE]
    run(command, "--out", str(prefixes))
    (folder / NAMES[0]).write_bytes((folder / NAMES[1]).read_bytes())
    run(command, "--out", str(prefixes))
    run("caption", str(folder), model_flags(), "--max-new-tokens", "1", "--out", f"{answers}/")
    opens = encoding._open
    monkeypatch.setattr(encoding, "_open", lambda *_, **__: pytest.fail("it is opened"))

    assert "`answers` holds records of answers" in run(command, "--out", str(answers)).told.replace(f"{tmp_path}/", "")
    for number, wanted in ((1, "lacks 1 of the 2 "), (0, "lacks 2 of the 2 ")):
        (prefixes / f"prefixes-0000{number}.safetensors").unlink()
        lacking = run(command, "--out", str(prefixes))
        assert lacking.code == 2
        assert f"{wanted}prefix files that its records name: `prefixes-0000{number}.safetensors`" in lacking.err
    monkeypatch.setattr(encoding, "_open", opens)
    assert run(command, "--out", str(prefixes), "--overwrite").code == 0


@pytest.mark.parametrize("batch_size", ["1", "4"])
def test_a_file_is_written_at_its_age_also_while_known_pictures_pass(
    batch_size: str, run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_in_order(*arguments: Any, **options: Any) -> Prefetcher[Any, Any]:
        """Pictures are read when they are taken."""
        return Prefetcher(*arguments, **{**options, "shareable": lambda item: False})

    monkeypatch.setattr(encoding, "Prefetcher", read_in_order)
    for number in range(20):
        shutil.copy(folder / NAMES[1], folder / f"known-{number}.png")
    command = ["encode", str(folder), *ENCODER, "--batch-size", batch_size, "--out", str(tmp_path / "prefixes"), *HERE]
    run(command)
    shutil.copy(folder / NAMES[1], folder / "a-new-one.png")  # the first by name
    now, written_at = itertools.count(), list[float]()
    clock = SimpleNamespace(seconds=0.0)
    wants, write = JobPlanner.wants, encoding.write_prefixes

    def wants_in_ten_seconds(*arguments: Any) -> Any:
        clock.seconds = 10.0 * next(now)
        return wants(*arguments)

    def write_in_time(*arguments: Any) -> None:
        written_at.append(clock.seconds)
        write(*arguments)

    monkeypatch.setattr(JobPlanner, "wants", wants_in_ten_seconds)
    monkeypatch.setattr(encoding, "write_prefixes", write_in_time)
    # Of this module only: the event loops of servers in this process go by the real clock.
    clocks = {"monotonic": lambda: clock.seconds, "perf_counter": time.perf_counter, "sleep": time.sleep}
    monkeypatch.setattr(encoding, "time", SimpleNamespace(**clocks))
    ran = run(command, "--format", "jsonl")

    assert [Path(record["picture"]).name for record in ran.records] == ["a-new-one.png"]
    assert len(written_at) == 1
    assert written_at[0] < 2 * encoding.MAX_AGE_S + 40  # it is looked at after each batch


def test_a_table_of_questions_gives_each_picture_once(run: Run, folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    lines = [f"pictures/{name},What is {number}?" for number in range(2) for name in NAMES]
    table.write_text("\n".join(["picture,prompt", *lines, ""]))
    command = ["encode", "--manifest", str(table), *ENCODER, "--out", str(tmp_path / "prefixes"), *HERE]

    first = run(command, "--format", "jsonl")
    again = run(command, "--format", "jsonl")

    assert sorted(Path(record["picture"]).name for record in first.records) == sorted(NAMES)
    assert {record["prompt"] for record in first.records} == {""}
    assert "3 pictures encoded" in first.err
    assert again.records == []


def test_a_run_that_dies_before_its_records_loses_and_repeats_nothing(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = tmp_path / "prefixes"
    command = ["encode", str(folder), *ENCODER, "--out", str(prefixes), *HERE]
    write = encoding.write_prefixes

    def write_and_die(*arguments: Any) -> None:
        write(*arguments)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(encoding, "write_prefixes", write_and_die)
        assert run(command).code == 1
    assert run(command).code == 0

    assert len(list(prefixes.glob("*.safetensors"))) == 2  # the first file has no records
    assert len(run("caption", str(prefixes), DECODER).records) == 3
    assert {record["file"] for record in map(dict, read_records(prefixes / "part-00000.jsonl"))} == {
        "prefixes-00001.safetensors"
    }


@pytest.mark.slow
@pytest.mark.proves("encode: resume after kill -9", "CPU")
def test_a_killed_run_goes_on(run: Run, tmp_path: Path) -> None:
    prefixes = tmp_path / "prefixes"
    names = sorted(map(str, sample_pictures().glob("*.png")))[:9]
    command = [sys.executable, "-m", "llama_adapter", "encode", "--list", "-", "--out", str(prefixes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as process:
        process.stdin.write("".join(f"{name}\n" for name in names[:4]).encode())
        process.stdin.flush()
        index, until = prefixes / "part-00000.jsonl", time.monotonic() + 120
        while not (index.exists() and index.read_bytes().count(b"\n") == 4) and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    rest = run("encode", names, "--out", str(prefixes), "--format", "jsonl", HERE)

    assert len(rest.records) == len(names) - 4
    assert run("caption", str(prefixes)).texts() == run("caption", names).texts()


# Refusals


def test_prefixes_of_another_model_are_refused(
    run: Run, encode: Callable[..., str], folder: Path, bundle: Path, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    prefixes, kept = encode(ENCODER), encode("--model", str(bundle), "--keys-values", name="kept")
    other = ["--adapter", model_flags("CAPTION-TINY")[5], *ENCODER[2:]]
    commands = {
        "another adapter": ["caption", prefixes, *model_flags("LORA-BIAS-TINY")[:6]],
        "another number of queries": ["caption", prefixes, *model_flags("CAPTION-TINY")[:6]],
        "the embedded model": ["caption", prefixes],
        "keys of another model": ["caption", kept],
        "another order of colours": ["caption", prefixes, *DECODER, "--channel-order", "bgr"],
        "into the same folder": ["encode", str(folder), *other, "--out", prefixes],
        "other numbers into the same folder": ["encode", str(folder), *ENCODER, "--dtype=bfloat16", "--out", prefixes],
        "keys and queries in one folder": ["encode", str(folder), *ENCODER, "--out", kept],
        "pictures and prefixes": ["caption", prefixes, str(folder)],
        "an encoder beside prefixes": ["caption", prefixes, "--encoder", "clip.onnx"],
        "answers among prefixes": ["caption", str(folder), "--out", prefixes],
        "prefixes again": ["encode", prefixes, "--out", str(tmp_path / "again")],
        "on a cluster": ["caption", prefixes, "--engine", "ray"],
    }
    told = {}
    for name, command in commands.items():
        ran = run(command, HERE)
        assert ran.code in (1, 2)
        assert ran.out == ""
        error = ran.told[ran.told.index("error:") :]
        told[name] = re.sub(r"\b[0-9a-f]{12}\b", "DIGEST", error.replace(str(tmp_path), ""))

    assert told == snapshot


def with_half_of_the_layers(file: Path, to: Path) -> None:
    """Write a prefix file whose keys and values have half of the layers."""
    found = read_prefix_file(file)
    rows = []
    for number, entry in enumerate(found.entries):
        picture = PrefixRow(str(file), number, entry.digest).read(found)
        keys_values = (part[: len(part) // 2] for part in picture.keys_values or ())
        rows.append((entry.digest, entry.name, StoredPicture(picture.query_QD, *keys_values)))
    write_prefixes(to, found.encoding, rows)


def test_keys_and_values_of_other_sizes_are_refused(run: Run, folder: Path, bundle: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    encode = ["encode", "--model", str(bundle), "--keys-values", "--out", str(kept), *HERE]
    run(encode, str(folder / NAMES[0]))
    run(encode, str(folder))
    first, second = sorted(kept.glob("*.safetensors"))

    with_half_of_the_layers(second, second)
    ran = run("caption", str(kept), "--model", str(bundle))
    assert codes_of(ran) == ["", *["unsupported"] * 2]
    with_half_of_the_layers(first, first)
    refused = run("caption", str(kept), "--model", str(bundle))
    assert (refused.code, refused.out) == (1, "")
    assert "prefixes-00000.safetensors` holds keys and values of" in refused.err


def test_damage_is_an_error_of_the_pictures_it_meets(run: Run, encode: Callable[..., str]) -> None:
    prefixes = Path(encode(ENCODER))
    index, file = prefixes / "part-00000.jsonl", prefixes / "prefixes-00000.safetensors"
    whole, rows = file.read_bytes(), [json.loads(line) for line in index.read_text().splitlines()]

    def codes() -> list[str]:
        return codes_of(run("caption", str(prefixes), DECODER))

    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert codes() == ["", "", "truncated"]
    file.write_bytes(whole)
    rows[0]["file"] = "../prefixes/prefixes-00000.safetensors"
    rows[1]["row"] = 7
    rows[2]["file"] = "prefixes-00005.safetensors"
    index.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert codes() == ["missing", "prefixes", "truncated"]
    index.write_text("[]\n")
    assert codes() == ["prefixes"]
    index.unlink()
    assert codes() == ["prefixes"]
    assert len(run("caption", str(file), DECODER).texts()) == 3  # if only the file is given, it names its pictures
    file.write_bytes(whole[:-1])
    assert run("caption", str(file), DECODER).code == 1
