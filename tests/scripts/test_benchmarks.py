"""What the benchmarks of the service, of few bits and of own pictures count, and their pages. Speed is not tested."""

import asyncio
import base64
import copy
import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from llama_adapter.app.captioning.captioner import Answer, Captioner
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.runtime.schemes import QUANTISED, Precision
from llama_adapter.runtime.schemes.state import precision_of
from scripts import bench_service
from scripts.bits_report import Halves, Variant, agreement, compare_logits, mixed_model, run_decoder, variants
from scripts.common import sample_files
from scripts.own_pictures import sets, small_network
from scripts.own_pictures.baselines import accuracies, ridge
from scripts.own_pictures.scans import Scans
from scripts.own_pictures.sets import fewer, read_part, sets_of, write_set
from scripts.pages.render import read, render
from scripts.service_bench.client import Reply, ask_once
from scripts.service_bench.questions import CAPTION, Question, Workload
from tests.bounds import Float64, difference, spread

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*events: object) -> bytes:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    pieces = [f"data: {text}\n\n".encode() for text in texts]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


def whole(content: dict[str, Any], *, status: str = "200 OK", more: str = "") -> bytes:
    body = json.dumps(content).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def asked(page: bytes | None, *, timeout_s: float = 20.0) -> Reply:
    """The client's reply from a server that sends `page` and disconnects.

    With None, the server sends nothing and waits.
    """

    async def run() -> Reply:
        handlers: list[asyncio.Task[Any]] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            handlers.append(asyncio.current_task())  # type: ignore[arg-type]
            await reader.readuntil(b"the body")
            if page is None:
                await reader.read()
            else:
                writer.write(page)
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            return await ask_once("127.0.0.1", server.sockets[0].getsockname()[1], b"the body", timeout_s=timeout_s)
        finally:
            server.close()
            await server.wait_closed()
            await asyncio.gather(*handlers, return_exceptions=True)

    return asyncio.run(run())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_service_answers_whole_or_in_a_stream(is_streamed: bool) -> None:
    deltas = (delta(""), delta("a "), delta("star"), delta(""), {"choices": [], "usage": {}}, "[DONE]")
    streamed = STREAM_HEAD + chunked(*deltas) + b"0\r\n\r\n"
    reply = asked(streamed if is_streamed else whole({"choices": [{"message": {"content": "a star"}}]}))

    assert (reply.outcome, reply.text) == ("answered", "a star")
    assert is_streamed == (reply.first_token_s > 0)
    assert reply.first_token_s <= reply.total_s


def test_a_refusal_of_a_service_has_code_and_headers() -> None:
    reply = asked(whole({"error": {"code": "busy"}}, status="429 Too Many Requests", more="Retry-After: 3\r\n"))

    assert (reply.outcome, reply.status, reply.code) == ("refused", 429, "busy")
    assert reply.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("page", "outcome"),
    [
        (b"", "not_accepted"),
        (STREAM_HEAD, "broken"),
        (STREAM_HEAD + chunked(delta("a ")), "broken"),
        (STREAM_HEAD + chunked(delta("a ")) + b"0\r\n\r\n", "broken"),
        (STREAM_HEAD + chunked({"error": {"code": "engine_failed"}}) + b"0\r\n\r\n", "refused"),
        (whole({"error": {"code": "busy"}}, status="429 Too Many Requests")[:-3], "broken"),
        (None, "hung"),
    ],
)
def test_outcomes_of_incomplete_answers_of_a_service(page: bytes | None, outcome: str) -> None:
    assert asked(page, timeout_s=0.05 if page is None else 20.0).outcome == outcome


@pytest.mark.parametrize("picture", [b"", b"a", b"ab", b"abc"])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_load_on_a_service_appends_bytes_to_pictures_of_any_length(picture: bytes, is_new: bool) -> None:
    workload = Workload([Question(name="a", picture=picture, prompt=CAPTION)], is_new=is_new)
    bodies = [json.loads(next(workload)[1]) for _ in range(3)]
    urls = [body["messages"][0]["content"][0]["image_url"]["url"] for body in bodies]
    contents = [base64.b64decode(url.partition(",")[2], validate=True) for url in urls]

    assert all(content.startswith(picture) for content in contents)
    assert [int.from_bytes(content[-12:], "big") for content in contents] == ([1, 2, 3] if is_new else [0, 0, 0])


@pytest.mark.slow
def test_a_service_answers_a_short_load_as_the_captioner_answers(tmp_path: Path) -> None:
    bench_service.main(["--quick", "--out", str(tmp_path)])

    rows = read("service", tmp_path)["rows"]
    assert [(row["pictures"], row["clients"]) for row in rows] == [("new", 1), ("new", 4), ("known", 1), ("known", 4)]
    assert all(row["requests"] > 0 and not row["others"] and row["num_wrong"] == 0 for row in rows)
    assert "| known | 4 |" in (tmp_path / "service.md").read_text(encoding="utf-8")


ANSWER = Answer(index=0, picture="x", digest="", prompt="", text="", token_ids=(5, 6, 7), finish="stop")


def test_agreement_of_few_bits_is_that_of_captions_and_of_tokens() -> None:
    expected = [ANSWER, ANSWER]
    answers = [ANSWER, replace(ANSWER, token_ids=(5, 9))]

    assert agreement(answers, expected) == {"captions": 0.5, "tokens": 4 / 6}


def test_errors_of_logits_of_few_bits_are_in_their_own_unit() -> None:
    expected = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 0.0]])
    logits = torch.tensor([[1.0, 5.0, 4.0], [3.0, 0.0, 0.0]])

    found = compare_logits(logits, expected)

    assert (found["max_error"], found["mean_error"], found["same_best"]) == (3.0, 0.5, 0.5)
    assert found["relative_error"] == pytest.approx(3 / 30**0.5)


@pytest.mark.parametrize("precision", QUANTISED)
def test_a_variant_of_few_bits_has_the_halves_that_it_names(precision: Precision) -> None:
    for variant in variants(precision):
        model = mixed_model(variant)
        for wanted, state in ((variant.decoder, model.decoder_state), (variant.encoder, model.vision_state)):
            assert precision_of(state) == wanted


def test_outliers_do_not_change_what_the_decoder_computes() -> None:
    plain, planted = (mixed_model(Variant(name="", has_outliers=is_planted)) for is_planted in (False, True))
    tokens, query = torch.tensor([[1, 40, 7, 300]]), torch.randn(1, 10, plain.decoder_config.dim)

    logits, largest, limits = [], [], []
    for model in (plain, planted):
        decoder = decoder_from_state(model.decoder_config, model.decoder_state)
        seen = []
        decoder.layers[1].feed_forward.gate_up.register_forward_hook(
            lambda module, inputs, out, seen=seen: seen.append(float(inputs[0].abs().max()))
        )
        with torch.inference_mode():
            hidden = run_decoder(decoder, tokens, decoder.project_prefix(query))
            logits.append(decoder.logits(hidden))
        largest.append(max(seen))
        with torch.inference_mode(), Float64():
            decoder = decoder.double()
            hidden = run_decoder(decoder, tokens, decoder.project_prefix(query.double()))
            limits.append(spread(logits[-1], decoder.logits(hidden)))

    assert difference(*logits) <= max(limits)
    assert largest[1] > 5 * largest[0]


def test_forced_logits_lead_to_the_greedy_answer() -> None:
    pictures = list(map(str, sample_files()[:3]))
    answers = Captioner.load().generate(pictures)
    halves = Halves(mixed_model(Variant(name="float32")))

    logits = halves.answer_logits(halves.visual_queries(pictures), [answer.token_ids for answer in answers])

    assert logits.argmax(-1).tolist() == [token for answer in answers for token in answer.token_ids]


FIGURE = {"value": 0.9, "low": 0.85, "high": 0.95}
ABOUT = {"cpu": "", "num_cpus": 2, "threads": 2, "load_before": None, "versions": {}, "commit": "", "time": ""}
ROW: dict[str, Any] = {"seconds": 60.0, "choices": FIGURE, "open": FIGURE, "num_trained": 320}


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise in place of what scikit-learn and scikit-image contain."""
    rng = np.random.default_rng(0)
    scans = Scans(ink_NHW=rng.uniform(0, 16, (80, 8, 8)), digits_N=np.arange(80) % 10)
    noise = Image.fromarray(rng.integers(0, 256, (300, 400, 3), dtype=np.uint8))
    monkeypatch.setattr(sets, "load_scans", lambda: scans)
    monkeypatch.setattr(sets, "photograph", lambda name: noise)


@pytest.fixture
def hands(tmp_path: Path) -> Path:
    for number in range(50):
        path = tmp_path / "hands" / str(number % 10) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (5 * number, 0, 0)).save(path)
    return tmp_path / "hands"


@pytest.mark.usefixtures("without_packages")
def test_sets_of_own_pictures_are_functions_of_the_seed_with_equal_classes(hands: Path) -> None:
    assert "signs" not in sets_of(None)
    for name, make in sets_of(hands).items():
        more, again, other = make(3, 4), make(3, 2), make(4, 2)
        classes = [label for _, label in more]
        assert [classes.count(label) for label in dict.fromkeys(classes)] == [4] * 10, name
        first = [picture.tobytes() for number, (picture, _) in enumerate(more) if number % 4 < 2]
        assert first == [picture.tobytes() for picture, _ in again], name
        assert first != [picture.tobytes() for picture, _ in other], name
        assert len({picture.tobytes() for picture, _ in more}) == 40, name
        assert all(picture.mode == "RGB" for picture, _ in more), name


def test_a_set_of_own_pictures_is_written_once_as_folders_by_class_and_read_again(hands: Path, tmp_path: Path) -> None:
    pictures = sets_of(hands)["signs"](0, 5)
    write_set(tmp_path / "set", lambda: pictures, held_out=2)
    write_set(tmp_path / "set", lambda: pytest.fail("it is finished"), held_out=2)

    learn, held = (read_part(tmp_path / "set" / part) for part in ("learn", "held"))
    assert learn.classes == held.classes == tuple("0123456789")
    assert np.bincount(learn.labels_N).tolist() == [3] * 10
    assert np.bincount(held.labels_N).tolist() == [2] * 10
    assert held.pictures[2].tobytes() == pictures[5][0].tobytes()
    assert learn.pictures[0].tobytes() == pictures[2][0].tobytes()
    assert len(list(fewer(tmp_path / "set" / "learn", 2).glob("*/*.png"))) == 20


def _easy(rng: np.random.Generator) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Thirty points, of three classes that a line separates."""
    labels_N = np.arange(30) % 3
    return 4 * np.eye(5)[labels_N] + rng.normal(0, 0.3, (30, 5)), labels_N


def test_baselines_of_own_pictures_find_classes_that_a_line_separates() -> None:
    rng = np.random.default_rng(1)
    (learn_NF, labels_N), (held_MF, held_M) = _easy(rng), _easy(rng)
    names = ("grey pixels", "mean feature")

    found = accuracies(dict.fromkeys(names, learn_NF), labels_N, dict.fromkeys(names, held_MF), held_M)

    assert found == {
        "chance": pytest.approx(1 / 3),
        "nearest neighbour": 1.0,
        "ridge, grey pixels": 1.0,
        "ridge, mean feature": 1.0,
    }
    assert ridge(learn_NF[:3], labels_N[:3], held_MF).tolist() == held_M.tolist()  # one of each class
    shuffled_M = ridge(learn_NF, rng.permutation(labels_N), held_MF)
    assert (shuffled_M == held_M).mean() < 0.8


def test_the_small_network_learns_bright_and_dark_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_network, "time", SimpleNamespace(perf_counter=count().__next__))  # a step takes a second
    pictures = [(Image.new("RGB", (64, 64), (level,) * 3), str(level > 128)) for level in (*range(4), *range(252, 256))]
    write_set(tmp_path / "set", lambda: pictures, held_out=2)
    learn, held = (read_part(tmp_path / "set" / part) for part in ("learn", "held"))

    assert small_network.accuracy_after(40, learn, held, threads=torch.get_num_threads()) == 1.0


def test_the_page_of_own_pictures_names_the_sets_where_the_adapter_is_not_ahead() -> None:
    def row(name: str, best: float) -> dict[str, Any]:
        return {"set": name, "baselines": {"chance": 0.1, "small network": best}, **copy.deepcopy(ROW)}

    rows = [row("tools", 0.88), row("pages", 0.97), row("crops", 0.9)]
    counts = {"threads": 2, "learned": 40, "held_out": 20, "circumstances": ABOUT}
    splits = [
        {"bound": bound, "pictures": 100, "decided": decided, "right": right}
        for bound, decided, right in ((0.95, 60, 58), (0.96, 80, 75), (None, 0, 0))
    ]
    calibrated = {"set": "tools", "accuracy": 0.9, "splits": splits}
    figures = {
        "accuracy": {**counts, "rows": rows},
        "examples": {**counts, "rows": [{**rows[1], "per_class": 4}]},
        "calibration": {"promise": 0.95, "circumstances": ABOUT, "rows": [calibrated]},
    }

    page = render("own-pictures", figures)

    assert "| tools | 60 | 90.0 (85.0 to 95.0) | 90.0 (85.0 to 95.0) | 10.0 | 88.0 |" in page
    assert "**tools**" not in page
    assert '90.0 %, and that of the baseline "small network" is 97.0 %, outside the interval' in page
    assert '90.0 %, as is that of the baseline "small network", inside the interval' in page
    assert "ahead of every baseline on every set" not in page
    assert "| tools | 90.0 | 46.7 | 95.0 to 96.0 | 95.0 | 1 of 2 |" in page
    assert "| pages | 4 | 40 | 60 | 90.0 (85.0 to 95.0) | 97.0 | small network |" in page
    figures["accuracy"]["rows"] = rows[:1]
    assert "The adapter is ahead of every baseline on every set." in render("own-pictures", figures)
