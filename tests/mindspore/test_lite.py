"""MindSpore Lite's session with a stand-in that runs the same graphs in MindSpore and checks the documented calls."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_adapter import Captioner, InferConfig, InferTask, pipeline
from llama_adapter.app.captioning.captioner import TextDelta
from llama_adapter.app.command_line.main import main
from llama_adapter.llm.exported.card import read_card
from llama_adapter.llm.exported.mindir_program import open_mindir_program
from llama_adapter.runtime.errors import GraphError, UsageError
from llama_adapter.runtime.graphs.ge_config import read_ge_config
from llama_adapter.runtime.graphs.mindir_runtime import MindirRuntime
from llama_adapter.runtime.graphs.mslite_session import MsliteSession
from tests.app.captioning.test_exported import CHOICES, DRAWN, PROMPTS, SAMPLE_PROMPTS, SAMPLES
from tests.mindspore.models import encoder, exported, graph, greedy
from tests.mindspore.test_graphs import PICTURES
from tests.parity.golden import GENERATE, pixels

TEXTS = ["a small red star", "Below is"]


@pytest.mark.parametrize("name", ["bias_b3_mixed", "lora_b3_mixed", "caption_b1"])
def test_ids_are_those_of_the_reference(name: str, mslite: Any) -> None:
    case, folder = GENERATE[name], exported(GENERATE[name]["adapter"])
    made = open_mindir_program(read_card(folder), folder, MindirRuntime(backend="mslite"), num_slots=3)
    runtime = MindirRuntime(backend="mslite")
    [query] = runtime.open(graph("encoder", folder=folder)).run([pixels(case["images"]).numpy()])
    prompts = [prompt["ids"] for prompt in case["prompts"]]
    ids, _ = greedy(made, prompts, query, num_tokens=case["max_gen_len"], window=case["max_seq_len"])
    assert ids == case["output_ids"]


def test_options_reach_the_context_and_the_build(mslite: Any) -> None:
    config = read_ge_config(exported() / "config.ini")
    session = MsliteSession(graph("prefix"), target="ascend", device_id=0, config=config)
    assert session.info.name == "mindspore_lite (ascend)"
    built = mslite.RECORD.built[-1]
    assert (built["target"], built["device_id"], built["provider"]) == (["ascend"], 0, "ge")
    assert built["options"] == config.sections


def test_only_new_sizes_resize_the_model(mslite: Any) -> None:
    session = MsliteSession(graph("encoder"))
    for num_pictures in (1, 1, 2, 2, 1):
        picture = pixels(PICTURES[:num_pictures]).numpy()
        assert np.array_equal(session.run([picture])[0], encoder().run([picture])[0])
    assert [dims[0][0] for dims in mslite.RECORD.resized] == [1, 2, 1]


def test_failures_name_the_file(mslite: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.mindir"
    damaged.write_bytes(b"no graph")
    for path, options in (
        (damaged, {}),
        (tmp_path / "missing.mindir", {}),
        (graph("prefix"), {"target": "ascend", "device_id": 1}),
    ):
        with pytest.raises(GraphError) as failure:
            MsliteSession(path, **options)
        assert str(path) in failure.value.message
    session = MsliteSession(graph("prefix"))
    query = np.zeros((1, 10, 192), np.float32)
    monkeypatch.setenv("FAKE_FAIL", "predict")
    with pytest.raises(GraphError):
        session.run([query])
    monkeypatch.delenv("FAKE_FAIL")
    session.run([query])
    session.close()
    with pytest.raises(GraphError):
        session.run([query])


def test_without_the_package_its_source_is_told() -> None:
    with pytest.raises(GraphError) as failure:
        MsliteSession(graph("prefix"))
    assert "download page" in (failure.value.hint or "")


@pytest.mark.parametrize("backend", ["ms", "mslite"])
def test_the_four_ways_to_call(backend: str, mslite: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ways in MindSpore Lite's guide: by name, by the pair of graphs, by folder, and by an InferConfig."""
    folder = exported()
    monkeypatch.setenv("LLAMA_ADAPTER_HOME", str(folder.parent))
    paths = {"prefill_model_path": str(graph("prefill")), "increment_model_path": str(graph("increment"))}
    common: dict[str, Any] = {"ge_config_path": str(folder / "config.ini"), "device_id": 0, "infer_seq_length": 512}
    config = InferConfig(**paths, **common, model_type="mindir", model_name="embedded", target="CPU")
    with Captioner.load(device="cpu") as ours:
        wanted = pipeline("text_generation", ours)(TEXTS, max_new_tokens=8, add_special_tokens=False)
    for form in (folder.name, tuple(paths.values()), folder, config):
        if form is config:
            made = InferTask.get_infer_task("text_generation", config, tokenizer=ours.tokenizer, backend=backend)
        else:
            made = pipeline(
                task="text_generation",
                model=form,
                tokenizer=ours.tokenizer,
                backend=backend,
                model_name="embedded",
                target="CPU",
                **common,
            )
        with made:
            assert made.captioner.info.device.startswith("mindspore_lite" if backend == "mslite" else "mindspore (")
            assert made.captioner.spec.ge_config == common["ge_config_path"]
            assert made(TEXTS, is_sample_acceleration=True, add_special_tokens=False, max_new_tokens=8) == wanted


# The four programs of the guide. Names that it does not define, and paths, are added at the beginning.
TOKENIZER = "tokenizer = BloomTokenizer.from_pretrained({name})\n"
PIPELINE = """
lite_pipeline = pipeline(
    task="text_generation",
    model={model},
    tokenizer=tokenizer,
    backend="mslite",
    {model_name}ge_config_path=ge_config_path,
    device_id=0,
    infer_seq_length=512,
)
"""
CONFIG = """
lite_config = InferConfig(
    prefill_model_path=prefill_model_path,
    increment_model_path=increment_model_path,
    model_type="mindir",
    model_name="bloom_560m",
    ge_config_path=ge_config_path,
    device_id=0,
    infer_seq_length=512,
)
tokenizer = BloomTokenizer.from_pretrained("bloom_560m")
lite_pipeline = InferTask.get_infer_task("text_generation", lite_config, tokenizer=tokenizer)
"""
NAMED = 'model_name="bloom_560m",\n    '
PROGRAMS = {
    "name": TOKENIZER.format(name="model_name") + PIPELINE.format(model="model_name", model_name=""),
    "pair": TOKENIZER.format(name="model_name")
    + PIPELINE.format(model="(prefill_model_path, increment_model_path)", model_name=NAMED),
    "folder": TOKENIZER.format(name='"bloom_560m"') + PIPELINE.format(model="test_model_dir", model_name=NAMED),
    "config": CONFIG,
}


@pytest.mark.parametrize("way", PROGRAMS)
def test_the_programs_of_the_guide_run_as_written(
    way: str, mslite: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bloom_560m").symlink_to(exported())
    monkeypatch.setenv("LLAMA_ADAPTER_HOME", str(tmp_path))
    program = tmp_path / "lite.py"
    program.write_text(
        "from mindformers.models import BloomTokenizer\n"
        "from mindformers.pipeline import pipeline\n"
        "from mindformers.infer.infer_config import InferConfig\n"
        "from mindformers import InferTask\n"
        'model_name = "bloom_560m"\n'
        f"prefill_model_path, increment_model_path = {str(graph('prefill'))!r}, {str(graph('increment'))!r}\n"
        f"test_model_dir, ge_config_path = {str(exported())!r}, {str(exported() / 'config.ini')!r}\n"
        + PROGRAMS[way]
        + 'output = lite_pipeline("I love Beijing,because", is_sample_acceleration=True,add_special_tokens=False)\n'
        "print(output)\n"
        "import sys; print(lite_pipeline.captioner.info.device, file=sys.stderr)\n"
    )

    capsys.readouterr()  # of the export
    assert main(["run-reference", str(program)]) == 0

    ran = capsys.readouterr()
    with Captioner.load(device="cpu") as ours:
        wanted = pipeline("text_generation", ours)("I love Beijing,because", add_special_tokens=False)
    assert (ran.out, ran.err) == (f"{wanted}\n", "mindspore_lite (cpu)\n")


@pytest.fixture(scope="module")
def torchs() -> Captioner:
    return Captioner.load(device="cpu", dtype="float32", batch_size=16)


@pytest.mark.parametrize(("batch_size", "num_pictures"), [(1, 5), (5, 12), (16, 32)])
@pytest.mark.proves("embedded model", "MindSpore")
@pytest.mark.proves("continuous batching", "MindSpore")
def test_sample_pictures_have_torchs_answers(torchs: Captioner, batch_size: int, num_pictures: int) -> None:
    pictures, prompts = SAMPLES[:num_pictures], SAMPLE_PROMPTS[:num_pictures]
    with Captioner.load(decoder=str(exported()), batch_size=batch_size) as captioner:
        made = captioner.generate(pictures, prompts)
    wanted = torchs.generate(pictures, prompts)
    assert [answer.token_ids for answer in made] == [answer.token_ids for answer in wanted]


@pytest.mark.proves("streaming", "MindSpore")
@pytest.mark.proves("choices by scoring", "MindSpore")
def test_pictures_are_captioned_drawn_streamed_and_chosen_as_by_torch(torchs: Captioner, mslite: Any) -> None:
    pictures = SAMPLES[:7]

    def answers(captioner: Captioner) -> tuple[Any, list[Any]]:
        made = [captioner.generate(pictures, PROMPTS[0], **options) for options in ({}, DRAWN)]
        events = captioner.stream(pictures[0], PROMPTS[1], max_new_tokens=6)
        pieces = [event.text for event in events if isinstance(event, TextDelta)]
        chosen = captioner.generate(pictures, PROMPTS[1], choices=CHOICES)
        ids = [[answer.token_ids for answer in answers] for answers in made]
        return (ids, pieces), [answer.choice for answer in chosen]

    wanted, wanted_shares = answers(torchs)
    for backend in ("ms", "mslite"):
        with pipeline("caption", exported(), backend=backend, target="CPU").captioner as theirs:
            made, shares = answers(theirs)
        assert made == wanted
        for share, other in zip(shares, wanted_shares, strict=True):
            assert share == pytest.approx(other, abs=1e-4)


def test_infer_task_runs_graphs_by_mindspore_lite(mslite: Any) -> None:
    paths: Any = {"prefill_model_path": str(graph("prefill")), "increment_model_path": str(graph("increment"))}
    options = exported() / "config.ini"
    config = InferConfig(**paths, ge_config_path=str(options), target="Ascend")
    with InferTask.get_infer_task("caption", config) as describe:
        assert describe.captioner.info.device == "mindspore_lite (ascend)"
        assert describe.captioner.info.context == 512
    assert mslite.RECORD.built[-1]["options"] == read_ge_config(options).sections


def test_forms_that_are_no_graphs_are_refused(tmp_path: Path) -> None:
    folder = exported()
    prefill, increment = str(graph("prefill")), str(graph("increment"))
    shutil.copytree(folder, tmp_path / "two yaml")
    (tmp_path / "two yaml" / "b.yaml").write_text("infer: {}\n")
    forms: list[tuple[Any, dict[str, Any]]] = [
        (tmp_path / "two yaml", {}),
        ((increment, prefill), {}),
        ((prefill, "nowhere.mindir"), {}),
        (folder, {"model_type": "mindir_lite"}),
        (folder, {"rank_id": 1}),
        (folder, {"encoder_device": "npu:1"}),
        (folder, {"target": "TPU"}),
        (folder, {"target": "GPU"}),
    ]
    for form, settings in forms:
        with pytest.raises(UsageError):
            pipeline("caption", form, backend="ms", **settings)


def test_fewer_tokens_than_asked_for_are_told() -> None:
    with pytest.warns(UserWarning, match="512 tokens"):
        made = pipeline("caption", exported(), backend="ms", infer_seq_length=600, target="CPU")
    with made:
        assert made.captioner.info.context == 512
    with pipeline("caption", exported(), device="cpu") as describe:  # a model without a backend too
        assert describe.captioner.info.device == "mindspore (CPU)"
