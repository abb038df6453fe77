"""Calls of a captioner from threads and event loops, with a progress bar, and the form of their answers."""

import asyncio
import dataclasses
import inspect
import json
import re
import sys
import threading
import typing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest
import torch

from llama_adapter import Answer, Captioner, TextDelta, answers_to_pandas
from llama_adapter.app.captioning.captioner import Event
from llama_adapter.app.models.spec import CaptionerSpec
from tests.app.golden import GOLDEN, model_options

PICTURES = sorted((GOLDEN / "images").iterdir())


def ids(answers: list[Answer]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def test_load_takes_every_field_of_the_spec_with_its_default_and_its_types() -> None:
    parameters = dict(inspect.signature(Captioner.load).parameters)
    parameters.pop("allowed_hosts")

    assert {name: one.default for name, one in parameters.items()} == dataclasses.asdict(CaptionerSpec())

    ours, theirs = typing.get_type_hints(Captioner.load, localns={"torch": torch}), typing.get_type_hints(CaptionerSpec)
    for name in parameters:
        own, given = (set(typing.get_args(hints[name])) or {hints[name]} for hints in (theirs, ours))
        assert own <= given, name


def test_calls_of_several_threads_wait_for_each_other(captioner: Captioner) -> None:
    expected = ids(captioner.generate(PICTURES, max_new_tokens=6))
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: ids(captioner.generate(PICTURES, max_new_tokens=6)), range(4)))

    assert found == [expected] * 4


def test_a_call_waits_for_the_open_stream_of_another_thread(captioner: Captioner) -> None:
    stream = captioner.stream(PICTURES[:1], max_new_tokens=8)
    next(stream)
    answered = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(captioner.caption, PICTURES[1], max_new_tokens=4)
        answer.add_done_callback(lambda _: answered.set())
        assert not answered.wait(0.2)
        stream.close()
        assert answer.result(60).error is None


def test_a_call_of_the_thread_that_reads_on_is_refused(captioner: Captioner) -> None:
    stream = captioner.stream(PICTURES[:3], max_new_tokens=8)
    next(stream)
    refused: list[str] = []

    def read_on() -> None:
        next(stream)
        try:
            captioner.caption(PICTURES[0])
        except RuntimeError as error:
            refused.append(str(error))

    thread = threading.Thread(target=read_on, daemon=True)
    thread.start()
    thread.join(10)
    stream.close()
    thread.join(60)
    assert refused == ["This Captioner is still answering another call: read its stream to the end or close it"]


def test_what_nobody_can_read_any_more_or_has_failed_blocks_no_call_of_its_thread(captioner: Captioner) -> None:
    def left_in_a_cycle(stream: Iterator[Event]) -> None:
        next(stream)
        cycle: list[object] = [stream]
        cycle.append(cycle)

    left_in_a_cycle(captioner.stream(PICTURES, max_new_tokens=8))
    assert captioner.caption(PICTURES[0]).error is None
    with pytest.raises(AttributeError), captioner.open_loop(clock=5):  # type: ignore[arg-type]
        pass
    assert captioner.caption(PICTURES[0]).error is None


@pytest.mark.proves("streaming", "CPU")
def test_async_answers_and_events_are_those_of_threads(captioner: Captioner) -> None:
    options = {"max_new_tokens": 6, "temperature": 0.9, "seed": 3}
    expected = captioner.generate(PICTURES, "Describe the image.", **options)  # type: ignore[arg-type]

    async def both() -> tuple[list[Answer], list[Answer], dict[int, str]]:
        ask = captioner.agenerate(PICTURES, "Describe the image.", **options)  # type: ignore[arg-type]
        first, second = await asyncio.gather(ask, captioner.agenerate(PICTURES[:1], choices=["yes", "no"]))
        pieces: dict[int, str] = dict.fromkeys(range(len(PICTURES)), "")
        ended = set[int]()
        async for event in captioner.astream(PICTURES, "Describe the image.", **options):  # type: ignore[arg-type]
            if isinstance(event, TextDelta):
                assert event.index not in ended, "text after the answer"
                pieces[event.index] += event.text
            else:
                ended.add(event.index)
        return first, second, pieces

    first, second, pieces = asyncio.run(both())

    assert ids(first) == ids(expected)
    assert second[0].finish == "choice"
    assert pieces == {answer.index: answer.text for answer in expected}


def test_a_call_that_is_left_or_cancelled_ends_and_the_next_one_is_answered(captioner: Captioner) -> None:
    async def leave() -> list[Answer]:
        async with aclosing(captioner.astream(PICTURES * 40, max_new_tokens=60)) as events:
            async for _ in events:
                break
        running = asyncio.create_task(captioner.agenerate(PICTURES * 40, max_new_tokens=60))
        waiting = asyncio.create_task(captioner.agenerate(PICTURES * 40, max_new_tokens=60))
        await asyncio.sleep(0.05)
        for task in (running, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return await captioner.agenerate(PICTURES[:1], max_new_tokens=4)

    before = captioner.generate(PICTURES[:1], max_new_tokens=4)
    assert ids(asyncio.run(leave())) == ids(before)


def test_progress_without_tqdm_is_refused_before_anything_is_computed(
    captioner: Captioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="tqdm"):
        captioner.stream(PICTURES, progress=True)


def test_progress_counts_answers_on_stderr(captioner: Captioner, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    answers = captioner.generate(PICTURES, max_new_tokens=2, progress=True)
    out, err = capsys.readouterr()

    assert len(answers) == len(PICTURES)
    assert out == ""
    assert f"{len(PICTURES)}/{len(PICTURES)}" in err


def test_a_captioner_and_an_answer_show_what_they_are(captioner: Captioner) -> None:
    assert repr(captioner) == (
        "Captioner('BIAS-TINY', device='cpu', dtype='float32', precision='float', vision='torch', context=512, "
        "batch_size=4)"
    )
    answer = captioner.ask(PICTURES[0], "Is it red?", choices=["yes", "no"])
    assert repr(answer) == (
        f"Answer(picture={str(PICTURES[0])!r}, text={answer.text!r}, finish='choice', choice={answer.choice!r})"
    )
    assert "code='missing'" in repr(captioner.caption("missing.png"))
    assert json.loads(json.dumps(dataclasses.asdict(answer)))["choice"] == answer.choice


def test_answers_become_a_table(captioner: Captioner) -> None:
    pytest.importorskip("pandas")
    pictures = [PICTURES[0], "missing.png"]
    table = answers_to_pandas(captioner.generate(pictures, "Is it red?", choices=["yes", "no"]))

    assert list(table["picture"]) == [str(PICTURES[0]), "missing.png"]
    assert list(table["error"].fillna("")) == ["", "missing"]
    assert table["probability of yes"][0] + table["probability of no"][0] == pytest.approx(1)
    assert list(answers_to_pandas([]).columns) == list(table.columns)[:-2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_tokens", "'max_tokens': did you mean 'max_new_tokens'?"),
        ("topp", "'topp': did you mean 'top_p'?"),
        ("text_prefix", "'text_prefix': the options are "),  # of texts only
        ("zzz", "'zzz': the options are max_new_tokens, "),
    ],
)
@pytest.mark.parametrize("call", ["caption", "ask", "generate", "stream", "agenerate"])
def test_a_mistyped_option_is_named_with_a_similar_one(
    captioner: Captioner, call: str, name: str, message: str
) -> None:
    given = [PICTURES[0], "Is it red?"] if call == "ask" else [PICTURES[0]]

    async def asked() -> None:
        result = getattr(captioner, call)(*given, **{name: 5})
        if inspect.isawaitable(result):
            await result

    with pytest.raises(TypeError, match=re.escape(f"unexpected keyword argument {message}")):
        asyncio.run(asked())


def test_a_closed_captioner_does_not_answer() -> None:
    with Captioner.load(**model_options()) as captioner:
        begun, unread = captioner.stream(PICTURES[:2]), captioner.stream(PICTURES[0])
        next(begun)
    captioner.close()

    for call in (
        lambda: list(begun),
        lambda: list(unread),
        lambda: captioner.caption(PICTURES[0]),
        lambda: captioner.ask(PICTURES[0], "Is it red?"),
        lambda: captioner.generate(PICTURES),
        lambda: captioner.generate_text("Hello", text_prefix="zeros"),
        lambda: asyncio.run(captioner.agenerate(PICTURES)),
        captioner.warm_up,
    ):
        with pytest.raises(RuntimeError, match="This Captioner is closed"):
            call()
