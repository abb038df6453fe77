"""`pipeline`: models and inputs in every form, options under the names of other systems."""

import base64
import io
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import TextStreamer as TransformersStreamer

from llama_adapter import (
    Captioner,
    InferConfig,
    InferTask,
    RawPrompt,
    TextIteratorStreamer,
    TextStreamer,
    UsageError,
    pipeline,
)
from llama_adapter.app.compat.pipeline import Pipeline
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from tests.app.golden import GOLDEN, model_options

pytestmark = pytest.mark.usefixtures("models_placed_once")

STAR, CIRCLE = str(sample_pictures() / "12-red-star.jpg"), str(sample_pictures() / "09-purple-circle.png")
PROMPTS = ["I love Beijing, because", "LLaMA is a", "Huawei is a company that"]
IS_STAR, COLOR = "Is there a red star?", "What color is the circle?"
BUNDLE = str(embedded_model())


@pytest.fixture(scope="module")
def captioner() -> Iterator[Captioner]:
    with Captioner.load(device="cpu", batch_size=2) as captioner:
        yield captioner


@pytest.fixture
def caption(captioner: Captioner) -> Pipeline:
    return pipeline("caption", captioner)


@pytest.fixture
def text(captioner: Captioner) -> Pipeline:
    return pipeline("text_generation", captioner)


def test_several_answers_to_each_input(text: Pipeline, caption: Pipeline, captioner: Captioner) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "seed": 3, "temperature": 1.0}
    raw = [RawPrompt(prompt) for prompt in PROMPTS[:2]]
    expected = [answer.text for answer in captioner.generate_text(raw, n=3, **options)]

    outputs = text(PROMPTS[:2], num_return_sequences=3, return_full_text=False, **options)
    assert [output["text_generation_text"] for output in outputs] == [expected[:3], expected[3:]]
    assert [len(set(output["text_generation_text"])) > 1 for output in outputs] == [True, True]
    [shown] = caption(STAR, num_return_sequences=2, do_sample=True, seed=1)
    assert (len(shown["caption_text"]), len(shown)) == (2, 2)
    with pytest.raises(ValueError, match="num_return_sequences must be a whole number of at least 1"):
        text("x", num_return_sequences=0)


@pytest.mark.proves("pipeline, InferTask", "CPU")
def test_a_batch_of_pictures_and_its_table(caption: Pipeline, captioner: Captioner) -> None:
    outputs = caption([STAR, "missing.jpg", CIRCLE], max_new_tokens=20)

    expected = [answer.text for answer in captioner.generate([STAR, CIRCLE], max_new_tokens=20)]
    assert [output["caption_text"] for output in outputs] == [[expected[0]], [""], [expected[1]]]
    assert [output.get("error") for output in outputs] == [None, "missing", None]
    assert list(outputs.to_pandas()["text"]) == [expected[0], "", expected[1]]
    for alone in (Image.open(STAR), np.array(Image.open(STAR).convert("RGB"))):  # one picture, and no data set
        assert [output["caption_text"] for output in caption(alone, max_new_tokens=20)] == [[expected[0]]]


def test_a_damaged_image_has_the_number_of_its_place_however_it_is_given(caption: Pipeline) -> None:
    data = Path(STAR).read_bytes()

    def damaged() -> Image.Image:
        return Image.open(io.BytesIO(data[: len(data) // 2]))

    outputs = caption([STAR, damaged(), iter([Image.open(STAR), damaged()])], max_new_tokens=1)
    for place in (1, 3):
        assert f"`picture {place}` is cut off or damaged" in outputs[place]["reason"]


def test_questions_and_choices(captioner: Captioner) -> None:
    ask, choose = pipeline("ask", captioner), pipeline("choose", captioner, choices=["yes", "no"])

    assert ask(CIRCLE, COLOR)[0]["ask_text"] == ["purple"]
    (output,) = choose(CIRCLE, question=IS_STAR)
    assert output["choose_text"] == ["no"]
    assert output["probabilities"]["no"] > 0.5
    with pytest.raises(ValueError, match="ask"):
        ask(STAR)
    with pytest.raises(ValueError, match="choose"):
        pipeline("choose", captioner)(STAR, question="Is there a star?")
    with pytest.raises(ValueError, match=r"choices must be a list of texts such as .* got 'yes,no'"):
        choose(STAR, IS_STAR, choices="yes,no")
    with pytest.raises(TypeError, match="A prompt must be text"):
        ask([STAR, CIRCLE], [COLOR, COLOR])
    rows = [{"image": picture, "question": IS_STAR} for picture in (STAR, CIRCLE)]
    assert [output["choose_text"] for output in choose(rows)] == [["yes"], ["no"]]
    pandas = pytest.importorskip("pandas")
    assert [output["choose_text"] for output in choose(pandas.DataFrame(rows))] == [["yes"], ["no"]]
    assert [output["ask_text"] for output in ask(pandas.Series([STAR, CIRCLE]), IS_STAR)] == [["yes"], ["no"]]


@pytest.mark.parametrize(
    ("defaults", "row", "options"),
    [
        ({"prompt": IS_STAR}, {}, {"question": COLOR}),
        ({"question": IS_STAR}, {}, {"prompt": COLOR}),
        ({"prompt": COLOR}, {}, {"question": None}),
        ({}, {}, {"question": IS_STAR, "prompt": COLOR}),
        ({}, {"question": COLOR, "prompt": IS_STAR}, {"question": IS_STAR}),
        ({}, {"asked": COLOR, "question": IS_STAR}, {"text_column": "asked"}),
        ({}, {"asked": None, "question": IS_STAR}, {"text_column": "asked", "question": COLOR}),
    ],
)
def test_a_row_precedes_the_call_and_the_call_the_pipeline(
    defaults: Any, row: Any, options: Any, captioner: Captioner
) -> None:
    ask = pipeline("ask", captioner, **defaults)

    assert ask({"image": CIRCLE, **row}, **options)[0]["ask_text"] == ["purple"]


def test_a_row_without_the_named_column_is_refused_with_its_columns(caption: Pipeline, text: Pipeline) -> None:
    for asked, name in ((caption, "text_column"), (caption, "image_column"), (text, "text_column")):
        with pytest.raises(ValueError, match=r"an input has no column asked; its columns are image$"):
            asked({"image": STAR}, **{name: "asked"})


def test_a_data_set_is_read_batch_by_batch(captioner: Captioner) -> None:
    rows, read = [{"image": STAR}] * 6, list[int]()

    class Rows:
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> dict[str, str]:
            read.append(index)
            return rows[index]

    describe = pipeline("caption", captioner, max_new_tokens=1)
    outputs = describe(Rows())

    assert read == []
    assert [next(outputs)["caption_text"], read] == [["a"], list(range(captioner.batch_size))]
    assert len(list(outputs)) == 5
    assert [output["caption_text"] for output in describe(iter([STAR]))] == [["a"]]


def test_the_image_processor_comes_before_the_models_own(captioner: Captioner, tmp_path: Path) -> None:
    both = Image.new("RGB", (448, 224))
    both.paste(Image.open(CIRCLE).convert("RGB").resize((224, 224)), (224, 0))
    right = pipeline("caption", captioner, image_processor=lambda picture: picture.crop((224, 0, 448, 224)))
    file = io.BytesIO()
    both.save(file, "PNG")
    expected = pipeline("caption", captioner)(both.crop((224, 0, 448, 224)))[0]["caption_text"]

    for given in (both, file.getvalue(), f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"):
        assert right(given)[0]["caption_text"] == expected
    turned = both.transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[0x112] = 6  # upright after a quarter turn to the right
    turned.save(tmp_path / "both.png", exif=turned.getexif())
    for given in (str(tmp_path), str(tmp_path / "*.png"), tmp_path / "both.png"):
        outputs = right(["none.jpg", given, "http://example.com/a.jpg"])
        assert [output.get("error") for output in outputs] == ["missing", None, "image_host_not_allowed"]
        assert outputs[1] == {"caption_text": expected, "picture": str(tmp_path / "both.png")}


def test_the_documented_text_generation(text: Pipeline) -> None:
    outputs = text(PROMPTS, max_length=24, do_sample=False, top_k=3, top_p=1)

    assert [list(output) for output in outputs] == [["text_generation_text"]] * 3
    for prompt, output, answer in zip(PROMPTS, outputs, outputs.answers, strict=True):
        assert output["text_generation_text"][0] == prompt + output["text_generation_text"][0][len(prompt) :]
        assert answer.prompt_tokens + len(answer.token_ids) <= 24
        assert output["text_generation_text"][0].endswith(answer.text)
    alone = [text(prompt, max_length=24)[0] for prompt in PROMPTS]
    assert outputs == alone


def test_options_by_their_names_elsewhere(text: Pipeline) -> None:
    prompt = PROMPTS[0]
    (short,) = text(prompt, max_length=500, max_new_tokens=3).answers
    assert len(short.token_ids) <= 3
    drawn = [text(prompt, do_sample=True, seed=seed, max_new_tokens=8)[0] for seed in (1, 1, 2, 3, 4)]
    assert drawn[0] == drawn[1]
    assert len({str(output) for output in drawn}) > 1
    assert text(prompt, max_new_tokens=4, return_full_text=False)[0] == {
        "text_generation_text": [text(prompt, max_new_tokens=4).answers[0].text]
    }
    with_bos, without = (text(prompt, max_new_tokens=1, add_special_tokens=add).answers[0] for add in (True, False))
    assert with_bos.prompt_tokens == without.prompt_tokens + 1
    free, penalised = (
        text(prompt, max_new_tokens=12, repetition_penalty=by).answers[0].token_ids for by in (1.0, 50.0)
    )
    assert len(set(free)) < len(free)
    assert len(set(penalised)) == len(penalised)
    (cut,) = text("word " * 900, max_prompt_tokens=20, max_new_tokens=1).answers
    assert cut.details["prompt_tokens_cut"] > 800
    with pytest.warns(UserWarning, match="is_sample_acceleration"):
        text(prompt, max_new_tokens=1, is_sample_acceleration=True)
    with pytest.raises(TypeError, match="max_new_tokens"):
        text(prompt, max_new_token=1)


def test_generation_stops_at_the_ids_that_a_call_names(text: Pipeline) -> None:
    prompt = PROMPTS[0]
    whole = text(prompt, max_new_tokens=8).answers[0].token_ids
    (other,) = text.tokenizer.encode("zebra", bos=False)[:1]
    assert len(set(whole)) > 2
    assert other not in whole
    end = whole.index(whole[2])
    for given in (whole[2], [other, whole[2]]):
        (answer,) = text(prompt, max_new_tokens=8, eos_token_id=given, num_beams=1).answers
        assert (answer.token_ids, answer.finish) == (whole[:end], "stop")
    (answer,) = text(prompt, max_new_tokens=8, eos_token_id=other, num_beams=None).answers
    assert answer.token_ids == whole
    (drawn,) = text.captioner.generate_text([[1, 300]], max_new_tokens=8, stop_token_ids=range(512))
    assert (drawn.token_ids, drawn.finish) == ((), "stop")
    for refused in ({"eos_token_id": "</s>"}, {"eos_token_id": [True]}, {"eos_token_id": -1}):
        with pytest.raises(ValueError, match="stop_token_ids"):
            text(prompt, **refused)
    with pytest.raises(UsageError, match="num_beams"):
        text(prompt, num_beams=4)


def test_a_checkpoint_with_the_backend_of_graphs_runs_in_torch(captioner: Captioner) -> None:
    for form in (BUNDLE, InferConfig(prefill_model_path=BUNDLE), {"model": {"model": BUNDLE}}):
        with (
            pytest.warns(UserWarning, match="torch runs checkpoints"),
            pipeline("caption", form, None, None, None, "ms", device_id=0, max_new_tokens=2) as describe,
        ):
            assert describe(STAR)[0]["caption_text"] == ["a small"]
    with pytest.raises(UsageError, match="audio_processor"):
        pipeline("caption", captioner, None, None, "torch")  # type: ignore[arg-type]


def test_token_ids_in_every_form(text: Pipeline) -> None:
    ids = [1, 300, 301]
    (expected,) = text(ids, max_new_tokens=3)

    assert text(np.array(ids), max_new_tokens=3) == [expected]
    assert text(torch.tensor(ids), max_new_tokens=3) == [expected]
    assert text([np.array(ids), torch.tensor(ids)], max_new_tokens=3) == [expected] * 2
    with pytest.raises(TypeError):
        text(b"Hello")
    for given, shown in (([1, "a"], r"\[1, 'a'\]"), (3, "3"), ({"text": 3}, "3")):
        with pytest.raises(TypeError, match=f"got {shown}"):
            text(given)
    with pytest.raises(TypeError, match="got 1"):
        list(text(token_id for token_id in ids))


@pytest.mark.parametrize("kind", [TextStreamer, TransformersStreamer])
def test_a_streamer_tells_one_answer_after_the_other(kind: Any, text: Pipeline, capsys: Any) -> None:
    outputs = text(PROMPTS, streamer=kind(text.tokenizer), max_new_tokens=6)

    assert capsys.readouterr().out == "".join(output["text_generation_text"][0] + "\n" for output in outputs)
    text(PROMPTS[0], streamer=TextStreamer(skip_prompt=True), max_new_tokens=6)
    assert capsys.readouterr().out.strip() == outputs.answers[0].text.strip()


def test_pieces_of_an_answer_are_iterated_while_another_thread_makes_it(text: Pipeline) -> None:
    streamer = TextIteratorStreamer(skip_prompt=True, timeout=60)
    with ThreadPoolExecutor(1) as pool:
        outputs = pool.submit(text, PROMPTS[0], streamer=streamer, max_new_tokens=6)
        pieces = list(streamer)
    assert len(pieces) > 1
    assert "".join(pieces).strip() == outputs.result().answers[0].text.strip()


def test_a_streamer_gets_the_ids_of_a_stop_text_too(text: Pipeline) -> None:
    told: list[list[int]] = []

    keeping = SimpleNamespace(put=lambda value: told.append(value.tolist()), end=lambda: told.append([]))
    last = text.tokenizer.decode(text(PROMPTS[0], max_new_tokens=4).answers[0].token_ids).split()[-1]
    (answer,) = text(PROMPTS[0], max_new_tokens=4, stop=last, streamer=keeping).answers

    assert (answer.finish, len(told[0])) == ("stop", answer.prompt_tokens)
    assert told[1:] == [*([token_id] for token_id in answer.token_ids), []]


def test_a_streamer_that_fails_ends_its_call_only(text: Pipeline) -> None:
    def fail(value: np.ndarray) -> None:
        raise OSError("the reader has gone")

    expected = text(PROMPTS, max_new_tokens=6)
    with pytest.raises(OSError, match="the reader has gone"):
        text(PROMPTS, max_new_tokens=6, streamer=SimpleNamespace(put=fail))
    assert text(PROMPTS, max_new_tokens=6) == expected


class Numbers:
    """A tokenizer whose texts are the ids."""

    def decode(self, token_ids: list[int]) -> str:
        return str(token_ids)


@pytest.mark.parametrize(
    "value",
    [5, [5], {5}, iter([5]), (number for number in [5]), [[5]], np.array(5), np.array([[5]]), torch.tensor([5])],
)
def test_a_streamer_takes_token_ids_in_every_form(value: Any, capsys: Any) -> None:
    TextStreamer(Numbers()).put(value)

    assert capsys.readouterr().out == "[5]"
    for rows in ([[5, 6], [7]], np.array([[5], [6]])):
        with pytest.raises(ValueError, match="one answer at a time, got 2 rows"):
            TextStreamer(Numbers()).put(rows)
    with pytest.raises(TypeError, match="not 'list'"):
        TextStreamer(Numbers()).put([[[1, 2], [3, 4]]])


def test_a_tokenizer_is_checked(captioner: Captioner) -> None:
    own = captioner.tokenizer
    assert pipeline("text_generation", captioner, tokenizer=own).tokenizer is own

    for refused, said in (
        (SimpleNamespace(encode=lambda text: [1, 2, 3]), "encodes a text to other ids"),
        ("tokenizer.model", "object with `encode`, got str"),
    ):
        with pytest.raises(UsageError, match=said):
            pipeline("text_generation", captioner, tokenizer=refused)


def test_prompts_of_a_file_give_way_to_those_of_the_call() -> None:
    settings = {"run_mode": "predict", "load_checkpoint": BUNDLE, "predict_data": "Hello"}
    with pytest.warns(UserWarning, match="prompt"), pipeline("text_generation", settings, device="cpu") as complete:
        assert complete("a", max_new_tokens=1)[0]["text_generation_text"][0].startswith("a")


@pytest.mark.slow
def test_models_by_name_folder_files_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    shutil.copytree(embedded_model(), tmp_path / "home" / "shapes")
    monkeypatch.setenv("LLAMA_ADAPTER_HOME", f"nowhere:{tmp_path / 'home'}")
    golden = model_options()
    folder = tmp_path / "settings"
    folder.mkdir()
    (folder / "run.yaml").write_text(f"model: {{model: {BUNDLE}}}\ngeneration: {{max_new_tokens: 2}}\n")
    forms: dict[str, Any] = {
        "embedded": None,
        "name": "shapes",
        "bundle": BUNDLE,
        "folder with a YAML": folder,
        "settings": {"model": {"model": BUNDLE}},
        "flat settings": {"model": BUNDLE, "max_new_tokens": 2},
        "runner settings": {"model_path": BUNDLE, "exe_mode": "eager", "data_config": {"max_new_tokens": 2}},
        "config": InferConfig(prefill_model_path=BUNDLE),
    }
    for form in forms.values():
        with pipeline("caption", form, device="cpu", batch_size=1) as describe:
            assert describe(STAR, max_new_tokens=2)[0]["caption_text"] == ["a small"]
    with pipeline("caption", folder, device="cpu") as describe:
        assert describe(STAR)[0]["caption_text"] == ["a small"]
    with Captioner.load(model="shapes", device="cpu") as by_name:
        assert by_name.caption(STAR, max_new_tokens=2).text == "a small"
    files = (f"{golden['llama_dir']}/TINY", golden["adapter"], golden["clip"])
    with pipeline("caption", files, visual_heads=4, device="cpu", max_new_tokens=3) as describe:
        assert describe.captioner.info.name == "BIAS-TINY"
        assert len(describe(STAR).answers[0].token_ids) <= 3


def test_llama_alone_answers_texts_and_sees_no_pictures() -> None:
    with pipeline("text_generation", GOLDEN / "LLaMA-HF/TINY", device="cpu", max_new_tokens=4) as complete:
        assert len(complete(PROMPTS)) == 3
        with pytest.raises(UsageError):
            pipeline("caption", complete.captioner)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("nowhere", {}),
        ("prefill.mindir", {}),
        (("one",), {}),
        (17, {}),
        (None, {"backend": "ms"}),
        (None, {"backend": "tensorrt"}),
        (None, {"rank_id": 1}),
        ({"exe_mode": "eager", "world_size": 4, "parallel_config": {"attn_tp_size": 2}}, {}),
        (str(sample_pictures()), {}),
    ],
)
def test_models_that_are_not_served(model: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        pipeline("caption", model, **settings)


def test_unknown_tasks_and_folders_of_several_settings_are_told(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("command: caption\n")
    for task, model, hint in (("caption", tmp_path, "a.yaml, b.yaml"), ("translation", None, "text_generation")):
        with pytest.raises(UsageError) as caught:
            pipeline(task, model)
        assert hint in caught.value.hint
    assert caught.value.__notes__ == [f"hint: {caught.value.hint}"]


def test_infer_task() -> None:
    assert InferTask.support_list()[:3] == ["caption", "ask", "choose"]
    assert "text_generation" in InferTask.support_list()
    assert [InferTask.check_task_valid(name) for name in ("caption", "translation")] == [True, False]
    config = InferConfig(BUNDLE, "inc.mindir", infer_seq_length=256, target="CPU", mode="graph")
    eager = pytest.warns(UserWarning, match="Steps run eager: mode `graph`")
    with eager, pytest.warns(UserWarning, match="increment_model_path"):
        describe = InferTask.get_infer_task("caption", config)
    with describe:
        assert describe.captioner.info.context == 256
        assert describe(STAR)[0]["caption_text"] == ["a small red star at the left"]
    assert config.infer_seq_length == 256
