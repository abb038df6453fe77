"""The captioner's guarantees, on the reference's tiny random checkpoints."""

import asyncio
import copy
import enum
import io
import json
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import llama_adapter.vision.preprocess
from llama_adapter import Answer, Captioner, Dialogue, RawPrompt, TextDelta
from llama_adapter.app.captioning.captioner import WorkItem, work_items
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import PromptTooLongError
from llama_adapter.runtime.devices.transfer import begin_fetch, upload
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.schemes import Precision
from tests.app.golden import GOLDEN, model_options
from tests.llm.toys import default_dtype

PICTURES = sorted((GOLDEN / "images").iterdir())
PROMPTS = ["Describe the image.", ("Is it red?", "Look at the border."), "What is shown in this picture?", ("", "")]


def jobs(count: int = 16) -> list[tuple[Path, object]]:
    return [(PICTURES[index % len(PICTURES)], PROMPTS[index % len(PROMPTS)]) for index in range(count)]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """The answers of the jobs, each asked separately."""
    alone = Captioner.load(**model_options(), batch_size=1)
    return [alone.generate([picture], [prompt], max_new_tokens=12)[0].token_ids for picture, prompt in jobs()]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.proves("continuous batching", "CPU")
def test_answers_do_not_depend_on_batch_order_or_bad_neighbours(
    tmp_path: Path, batch_size: int, expected: list[tuple[int, ...]]
) -> None:
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(PICTURES[0].read_bytes()[:900])
    shuffled = [(index, *job) for index, job in enumerate(jobs())]
    shuffled += [(-1, bad, PROMPTS[0]), (-2, tmp_path / "missing.png", PROMPTS[1]), (-3, bad, PROMPTS[2])]
    random.Random(batch_size).shuffle(shuffled)
    batched = Captioner.load(**model_options(), batch_size=batch_size)
    _, pictures, prompts = zip(*shuffled, strict=True)
    answers = batched.generate(list(pictures), list(prompts), max_new_tokens=12)
    for (index, _, _), answer in zip(shuffled, answers, strict=True):
        assert answer.token_ids == (() if index < 0 else expected[index])
        assert (answer.finish == "error", answer.error is not None) == (index < 0, index < 0)
        assert index >= 0 or answer.text == ""


def test_what_came_is_answered_while_more_is_waited_for(captioner: Captioner) -> None:
    items = work_items(PICTURES[:2], "Describe the image.", default_prompt="")
    is_answered, answered = threading.Event(), []

    def slow_items() -> Iterator[WorkItem]:
        yield items[0]
        assert is_answered.wait(10)
        yield items[1]

    for event in captioner.run(slow_items(), sampling=SamplingParams(max_new_tokens=2), may_wait=True):
        if isinstance(event, Answer):
            answered.append(event.index)
            is_answered.set()

    assert answered == [0, 1]


@pytest.mark.parametrize("may_wait", [True, False])
def test_what_came_before_an_error_is_answered(captioner: Captioner, may_wait: bool) -> None:
    def items() -> Iterator[WorkItem]:
        yield from work_items(PICTURES[:3], "Describe the image.", default_prompt="")
        raise OSError("the list is gone")

    events = captioner.run(items(), sampling=SamplingParams(max_new_tokens=2), may_wait=may_wait)
    answered = []
    with pytest.raises(OSError, match="the list is gone"):
        answered.extend(event.index for event in events if isinstance(event, Answer))

    assert sorted(answered) == [0, 1, 2]


def test_upright_orientation_is_the_default_and_changes_the_answer_of_a_turned_picture(
    captioner: Captioner,
) -> None:
    turned = GOLDEN / "images/exif6_160x120.jpg"
    stored = Image.fromarray(np.asarray(Image.open(turned).convert("RGB")))  # without EXIF
    upright = stored.transpose(Image.Transpose.ROTATE_270)
    ignoring = Captioner.load(**model_options(), exif="ignore")
    by_file, by_hand = captioner.generate([turned, upright], max_new_tokens=8)
    as_stored, by_hand_as_stored = ignoring.generate([turned, stored], max_new_tokens=8)
    assert by_file.token_ids == by_hand.token_ids
    assert as_stored.token_ids == by_hand_as_stored.token_ids
    assert as_stored.token_ids != by_file.token_ids


def test_pictures_read_fast_are_answered_as_those_read_exactly_and_decode_less(
    captioner: Captioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = io.BytesIO()
    Image.open(PICTURES[0]).convert("RGB").resize((1800, 1800), Image.Resampling.BICUBIC).save(large, "JPEG")
    sizes: list[tuple[int, int]] = []
    plain = llama_adapter.vision.preprocess.preprocess

    def noting(image: Image.Image, **options: Any) -> np.ndarray:
        sizes.append(image.size)
        return plain(image, **options)

    monkeypatch.setattr(llama_adapter.vision.preprocess, "preprocess", noting)
    fast = Captioner.load(**model_options(), reading="fast")
    (exactly,) = captioner.generate([large.getvalue()], max_new_tokens=8)
    (quickly,) = fast.generate([large.getvalue()], max_new_tokens=8)
    assert sizes == [(1800, 1800), (450, 450)]
    assert quickly.token_ids == exactly.token_ids
    assert quickly.digest == exactly.digest


@pytest.mark.proves("choices by scoring", "CPU")
def test_choices_get_probabilities_that_sum_to_one_and_the_best_is_the_text(captioner: Captioner) -> None:
    for choices in (["Yes", "No"], ["red", "a blue circle", "nothing at all"], ["1", "10"]):
        answers = captioner.generate(PICTURES[:5], "Is it red?", choices=choices)
        for answer in answers:
            assert answer.finish == "choice"
            assert answer.choice is not None
            assert list(answer.choice) == choices
            assert sum(answer.choice.values()) == pytest.approx(1.0)
            assert answer.text == max(answer.choice, key=lambda text: answer.choice[text])  # type: ignore[index]
            assert captioner.tokenizer.decode(answer.token_ids) == answer.text


def test_a_prompt_beyond_the_context_and_a_context_beyond_the_memory_are_refused_before_any_work() -> None:
    with pytest.raises(DeviceError, match=r"slots with a context of 1000000000000 need .* GB"):
        Captioner.load(**model_options(), context=10**12)
    captioner = Captioner.load(**model_options(), context=40)
    with pytest.raises(PromptTooLongError, match="the context holds 40"):
        captioner.generate([Path("not read")])


def test_a_second_call_is_refused_while_a_stream_is_open_and_the_stream_goes_on(captioner: Captioner) -> None:
    whole = captioner.generate(PICTURES[:1], max_new_tokens=8)[0]
    stream = captioner.stream(PICTURES[:1], max_new_tokens=8)
    events = [next(stream)]
    with pytest.raises(RuntimeError, match="still answering another call"):
        captioner.caption(PICTURES[0])
    with pytest.raises(RuntimeError, match="still answering another call"):
        asyncio.run(captioner.agenerate(PICTURES[0]))
    events += list(stream)
    assert isinstance(events[-1], Answer)
    assert events[-1].token_ids == whole.token_ids
    captioner.stream(PICTURES[:1])  # a stream that has not begun blocks no other call
    with pytest.raises(ValueError, match="two different"):
        captioner.stream(PICTURES[:1], choices=["one"])  # neither does a stream that was refused
    assert captioner.generate(PICTURES[:1], max_new_tokens=8)[0].token_ids == whole.token_ids


@pytest.mark.parametrize(
    "prompts",
    [[b"hello"], [[1.7, 5.2]], [["1", "5"]], [([1, 2], None)], [RawPrompt(5)], [7], [("a", 5)], [{1: 2}], {"Red?": 1}],  # type: ignore[arg-type]
)
def test_a_prompt_of_another_kind_is_refused_in_a_sentence(captioner: Captioner, prompts: Any) -> None:
    with pytest.raises(TypeError, match="A prompt must be text"):
        captioner.generate(PICTURES[:1], prompts)


def test_pictures_and_choices_may_come_from_iterators(captioner: Captioner) -> None:
    assert captioner.generate([]) == []
    answers = captioner.generate(iter(PICTURES[:2]), choices=iter(["Yes", "No"]))  # type: ignore[arg-type]
    assert [answer.finish for answer in answers] == ["choice"] * 2
    with pytest.raises(ValueError, match="3 pictures came with 2 prompts"):
        captioner.generate(PICTURES[:3], ["a", "b"])


def test_numbers_that_overflow_end_in_an_error_and_do_not_reach_the_next_picture() -> None:
    captioner = Captioner.load(**model_options(), batch_size=2)
    expected = [answer.token_ids for answer in captioner.generate(PICTURES[:4], max_new_tokens=6)]
    scale = captioner._engine._runner.arrays["layers.2.feed_forward_norm.weight"]  # type: ignore[attr-defined]
    healthy = scale.copy()
    scale[:] = float("nan")
    for options in ({}, {"temperature": 0.7}, {"choices": ["Yes", "No"]}):
        for answer in captioner.generate(PICTURES[:3], **options):  # type: ignore[arg-type]
            assert answer.finish == "error"
            assert answer.error is not None
            assert answer.error.code == "not_finite"
    scale[:] = healthy
    assert [answer.token_ids for answer in captioner.generate(PICTURES[:4], max_new_tokens=6)] == expected


LEAST = "must be a whole number of at least"
OPTIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"model": ""}, "model is empty"),
    ({"batch_size": 2.5}, "batch_size"),
    ({"batch_size": "3"}, "batch_size"),
    ({"context": 0}, "context"),
    ({"visual_heads": 4}, "go with llama_dir"),
    ({"exif": "upside"}, "exif"),
    ({"reading": "slow"}, "reading"),
    ({"batch_size": True}, "batch_size must be a whole number of at least 1, got True"),
    ({"parallel_timeout": "x"}, "parallel_timeout must be a number, got 'x'"),
    ({"lora": 5}, "lora must be folders"),
    ({"encoder": "a.onnx", "provider_option": 5}, "provider_option must be texts"),
    ({"allowed_hosts": 5}, "allowed_hosts must be texts that are not empty, got 5"),
    ({"allowed_hosts": [5]}, "allowed_hosts must be texts that are not empty, got .5."),
    ({"model": "no such bundle", "allowed_hosts": "*"}, "A picture host is a name such as example.com, .* got '.'"),
    ({"strict": "x"}, "strict must be True or False, got 'x'"),
    ({"decoder": "a", "mode": "cuda_graph"}, "the export decides on"),
    ({"decoder": "a", "precision": "int8"}, "the export decides on"),
    ({"decoder": "a", "decoder_backend": "tensorrt"}, "decoder_backend"),
    ({"decoder_backend": "ms"}, "go with decoder, which is missing"),
    ({"ge_config": "config.ini"}, "go with decoder, which is missing"),
)
ARGUMENTS: tuple[tuple[Callable[[Captioner], object], type[Exception], str], ...] = (
    (lambda one: one.generate_text("a", text_prefix="x"), ValueError, "text_prefix must be none or zeros or"),  # type: ignore[arg-type]
    (lambda one: one.caption(PICTURES[0], task="x"), TypeError, "task must be a Task, got 'x'"),  # type: ignore[arg-type]
    (lambda one: one.caption(PICTURES[0], clock="x"), TypeError, "clock must be a StageClock"),  # type: ignore[arg-type]
    (lambda one: one.caption(PICTURES[0], stop=5), ValueError, "stop must be texts that are not empty, got 5"),  # type: ignore[arg-type]
    (lambda one: one.caption(PICTURES[0], n=2), ValueError, "n must be 1, got 2; `generate` gives several"),
    (lambda one: one.caption(PICTURES[0], prompt="x"), TypeError, "call `ask.picture, question"),  # type: ignore[call-arg]
    (lambda one: one.caption(PICTURES[0], prompts="x"), TypeError, "call `ask.picture, question"),  # type: ignore[call-arg]
    (lambda one: one.generate(PICTURES[0], prompt="x"), TypeError, "did you mean 'prompts'"),  # type: ignore[call-arg]
    (lambda one: one.caption(PICTURES[0], given=1), TypeError, "unexpected keyword argument 'given'"),  # type: ignore[call-arg]
    (lambda one: one.generate_text("x", given_items=1), TypeError, "unexpected keyword argument 'given_items'"),  # type: ignore[call-arg]
    (lambda one: one.warm_up(max_new_tokens="x"), ValueError, f"max_new_tokens {LEAST} 0"),  # type: ignore[arg-type]
    (lambda one: one.warm_up(max_new_tokens=-1), ValueError, f"max_new_tokens {LEAST} 0"),
    (lambda one: one.generate_text({"Is it red?": 1}), TypeError, "A prompt must be text"),  # type: ignore[arg-type]
    (lambda one: Captioner("bias-7b"), TypeError, r"got 'bias-7b': `Captioner\.load` takes a model's paths"),  # type: ignore[arg-type]
    (lambda one: Dialogue([("robot", "x")], "Why?"), TypeError, r"turn of a Dialogue .* got \('robot', 'x'\)"),  # type: ignore[arg-type, list-item]
    (lambda one: Dialogue(("user", "x"), "Why?"), TypeError, "turn of a Dialogue .* got 'user'"),  # type: ignore[arg-type]
    (lambda one: Dialogue([{"role": "user"}], "Why?"), TypeError, "turn of a Dialogue .* got {'role'"),  # type: ignore[arg-type, list-item]
    (lambda one: Dialogue((), None), TypeError, r"turn of a Dialogue .* got \('user', None\)"),  # type: ignore[arg-type]
    (pickle.dumps, TypeError, "A Captioner is not copied or pickled"),
    (copy.copy, TypeError, "A Captioner is not copied or pickled"),
    (lambda one: Captioner.from_spec(None), TypeError, r"Wanted a CaptionerSpec, got None: `Captioner\.load`"),  # type: ignore[arg-type]
)


def test_arguments_out_of_range_or_of_another_kind_are_refused_in_a_sentence(captioner: Captioner) -> None:
    for options, named in OPTIONS:
        with pytest.raises(ValueError, match=named):
            Captioner.load(**options)
    for call, error, named in ARGUMENTS:
        with pytest.raises(error, match=named):
            call(captioner)


@pytest.mark.parametrize("options", [{"max_new_tokens": -1}, {"n": 0}, {"logprobs": -1}, {"clock": 5}, {"seeds": 1}])
def test_options_are_checked_before_an_iterator_is_read(captioner: Captioner, options: dict[str, Any]) -> None:
    pictures = iter(PICTURES[:1])
    for call in (captioner.caption, captioner.generate, captioner.stream):
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            call(pictures, **options)
    assert next(pictures) == PICTURES[0]


def test_one_host_and_values_of_numpy_and_torch_are_taken(captioner: Captioner) -> None:
    options: dict[str, Any] = {"batch_size": np.int64(2), "parallel_timeout": np.float32(5)}
    options |= {"device": torch.device("cpu"), "dtype": torch.bfloat16, "allowed_hosts": "example.com"}
    with Captioner.load(**model_options(), **options) as loaded:
        assert (loaded.batch_size, loaded.info.device, loaded.info.dtype) == (2, "cpu", "bfloat16")
        assert type(loaded.spec.parallel_timeout) is float
        assert [host.host for host in loaded.allowed_hosts] == ["example.com"]
    plain = captioner.generate(PICTURES[:1], max_new_tokens=3, temperature=0.5, seed=1)
    options = {"max_new_tokens": np.int64(3), "temperature": np.float32(0.5), "seed": np.uint8(1)}
    assert captioner.generate(PICTURES[:1], **options)[0].token_ids == plain[0].token_ids
    assert json.dumps(SamplingParams(**options).settings())


class Said(str, enum.Enum):  # noqa: UP042  # as many programs have it; a StrEnum is formatted as its value
    ASKED = "Is it a member?"
    AYE = "aye"
    NAY = "nay"


MEMBERS = (
    Said.ASKED,
    ("Look.", Said.ASKED),
    (Said.ASKED, "Look."),
    RawPrompt(Said.ASKED),
    Dialogue((("user", "Hello"),), Said.ASKED),
)


@pytest.mark.parametrize("prompt", MEMBERS)
def test_a_text_that_is_a_member_of_an_enum_is_its_value(captioner: Captioner, prompt: Any) -> None:
    answer = captioner.ask(PICTURES[0], prompt, choices=[Said.AYE, Said.NAY])
    encoded = captioner.encode_prompt(prompt)
    for text in (captioner.tokenizer.decode(encoded.token_ids), encoded.text, answer.prompt):
        assert "Is it a member?" in text
    assert {*map(type, (encoded.text, answer.prompt, answer.text, *(answer.choice or ())))} == {str}


@pytest.mark.parametrize(
    ("adapter", "precision"), [("BIAS-TINY", "float"), ("BIAS-TINY", "int8"), ("LORA-BIAS-TINY", "float")]
)
def test_what_a_program_sets_in_torch_has_no_effect(adapter: str, precision: Precision) -> None:
    def answered() -> tuple[object, ...]:
        loaded = Captioner.load(**model_options(adapter), operators="aten", precision=precision)
        on_host = upload([1], torch.device("cpu"))
        assert begin_fetch(on_host).tolist() == [1]
        options: Any = {"max_new_tokens": 6, "temperature": 1.3, "seed": 3, "frequency_penalty": 0.3, "logprobs": 2}
        drawn = loaded.caption(PICTURES[0], **options)
        return drawn.token_ids, drawn.logprobs, loaded.ask(PICTURES[0], "Is it red?", choices=["Yes", "No"]).choice

    expected = answered()
    low = torch.bfloat16
    for context in (torch.device("meta"), default_dtype(low), default_dtype(torch.float64), torch.autocast("cpu", low)):
        with context:
            assert answered() == expected


def test_a_model_trained_on_opencvs_order_sees_plain_colours_without_their_transparency() -> None:
    captioner = Captioner.load(**model_options(), channel_order="bgr", transparency="ignore")
    transparent = Image.open(GOLDEN / "images/rgba_180x140.png").convert("RGBA")
    by_mode, plain = captioner.generate([transparent, transparent.convert("RGB")], max_new_tokens=12)
    assert by_mode.token_ids == plain.token_ids
    in_clips_way = Captioner.load(**model_options(), transparency="ignore")
    first, second = in_clips_way.generate([transparent, transparent.convert("RGB")])
    assert first.token_ids != second.token_ids


def test_an_answer_says_what_was_transparent_or_damaged_whatever_form_the_picture_has() -> None:
    path = GOLDEN / "images/rgba_180x140.png"
    image = Image.open(path).convert("RGBA")
    on_white = Image.new("RGB", image.size, "white")
    on_white.paste(image, mask=image.getchannel("A"))
    cut = path.read_bytes()[:-400]
    with Captioner.load(**model_options(), damaged="answer") as captioner:
        forms = [path, path.read_bytes(), image, np.asarray(image), on_white, cut]
        *answers, twin, part = captioner.generate(forms, max_new_tokens=8)

    assert [answer.details for answer in answers] == [{"transparent": True}] * 4
    assert {answer.token_ids for answer in answers} == {twin.token_ids}
    assert twin.details == {}
    assert part.details == {"transparent": True, "damaged": True}
    assert part.error is None


def test_several_answers_have_seeds_of_their_own_and_log_probabilities(captioner: Captioner) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 2.0, "top_p": 1.0}
    several = captioner.generate(PICTURES[:2], "Is it red?", n=3, seed=5, logprobs=2, **options)
    alone = [captioner.generate(PICTURES[:2], "Is it red?", seed=seed, **options) for seed in (5, 6, 7)]
    deltas = [event for event in captioner.stream(PICTURES[0], logprobs=0) if isinstance(event, TextDelta)]

    assert [answer.index for answer in several] == list(range(6))
    assert [answer.text for answer in several] == [alone[seed][picture].text for picture in (0, 1) for seed in range(3)]
    for answer in several:
        assert [len(one.top) for one in answer.logprobs] == [2] * len(answer.token_ids)
        assert all(one.top[0][1] >= one.top[1][1] and one.top[0][1] >= one.logprob for one in answer.logprobs)
    assert not alone[0][0].logprobs
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
