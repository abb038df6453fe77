"""MindIR graphs of the decoder and the encoder, run by MindSpore, compared with torch and the reference."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.exported.card import check_files, read_card
from llama_adapter.llm.exported.mindir_program import open_mindir_program
from llama_adapter.llm.exported.step import decode_step, prefill_step
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.llm.runners.draw import Draw
from llama_adapter.llm.runners.sampler import choose, predict
from llama_adapter.runtime.errors import GraphError, UsageError
from llama_adapter.runtime.graphs.mindir_runtime import MindirRuntime
from llama_adapter.vision.encoder import encoder_from_state
from llama_adapter.vision.export import BOUNDS, judge
from tests.app.golden import model_options
from tests.llm.toys import forward
from tests.mindspore.models import embedded, encoder, exported, greedy, place, program
from tests.parity.golden import GENERATE, GROUPS, batch, pixels, tensors

LOGITS_ATOL = 1e-4
PICTURES = GENERATE["bias_b3_mixed"]["images"]
PROMPTS = [[1, 50, 51, 52, 53, 54], [1, 60, 61], [1, 70, 71, 72, 73, 74, 75, 76, 77]]


def torch_logits(ids: list[int], visual_query_QD: np.ndarray) -> np.ndarray:
    """Logits (S, V) of all tokens, computed by the embedded model in torch."""
    model = embedded()
    decoder = decoder_from_state(model.decoder_config, model.decoder_state)
    with torch.inference_mode():
        prefix = decoder.project_prefix(torch.from_numpy(visual_query_QD[None]))
        logits: np.ndarray = decoder.logits(forward(decoder, torch.tensor([ids]), prefix))[0].numpy()
    return logits


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("num_pictures", [1, 3])
@pytest.mark.proves("visual query of the reference", "MindSpore")
@pytest.mark.proves("any number of pictures", "MindSpore")
@pytest.mark.proves("float16", "MindSpore")
def test_the_encoder_gives_the_visual_query_of_torch(precision: str, num_pictures: int) -> None:
    model, pixels_BHWC = embedded(), pixels(PICTURES[:num_pictures]).numpy()
    [query] = encoder(precision=precision).run([pixels_BHWC])
    with torch.inference_mode():
        wanted = encoder_from_state(model.vision_config, model.vision_state)(torch.from_numpy(pixels_BHWC)).numpy()
    assert query.dtype == precision
    assert judge(query[None], wanted, bound=BOUNDS[precision]).ok


@pytest.mark.parametrize(
    "case",
    [*GENERATE.values(), *(batch(group, num_rows=16) for group in GROUPS)],
    ids=[*GENERATE, *(f"16 ragged rows of {group}" for group in GROUPS)],
)
@pytest.mark.proves("token ids of the reference", "MindSpore")
@pytest.mark.proves("BIAS adapters", "MindSpore")
@pytest.mark.proves("LORA adapters", "MindSpore")
@pytest.mark.proves("CAPTION adapters (one query)", "MindSpore")
@pytest.mark.proves("Meta LLaMA and adapter", "MindSpore")
@pytest.mark.proves("float32", "MindSpore")
def test_ids_of_every_golden_case_are_those_of_the_reference(case: dict[str, Any]) -> None:
    [query] = encoder(case["adapter"]).run([pixels(case["images"]).numpy()])
    prompts = [prompt["ids"] for prompt in case["prompts"]]
    ids, _ = greedy(
        program(case["adapter"]), prompts, query, num_tokens=case["max_gen_len"], window=case["max_seq_len"]
    )
    assert ids == case["output_ids"]


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_of_prefill_and_increments_are_those_of_torch(rows: int) -> None:
    """Prompts have different lengths in one batch, and the cache grows."""
    prompts = PROMPTS[:rows]
    [query] = encoder().run([pixels(PICTURES[:rows]).numpy()])
    ids, logits = greedy(program(), prompts, query, num_tokens=70, eos_id=-1)
    for row, prompt in enumerate(prompts):
        wanted = torch_logits([*prompt, *ids[row]], query[row])
        magnitude = np.sqrt(np.mean(wanted**2))
        assert np.abs(np.stack(logits[row]) - wanted[len(prompt) - 1 : -1]).max() < LOGITS_ATOL * magnitude


def test_float16_logits_stay_near_the_reference() -> None:
    case, golden = GENERATE["bias_b3_mixed"], tensors("gen_bias_b3_mixed")
    made = program(case["adapter"], precision="float16")
    [query] = encoder(case["adapter"], precision="float16").run([pixels(case["images"]).numpy()])
    place(made, query)
    prompts = [row[: case["first_chunk_len"]].tolist() for row in golden["tokens"]]
    chosen = made.run(prefill_step(prompts, [None] * len(prompts), capacity=made.slots.capacity), first_slot=0)
    assert np.abs(chosen.logits_RV - golden["logits"][:, 0].numpy()).max() < 0.14


def test_drawn_tokens_are_those_of_the_sampler() -> None:
    numbers = np.random.default_rng(1)
    draws: list[Draw | None] = [None]
    draws += [
        Draw(temperature, top_p, top_k, float(numbers.uniform()))
        for temperature in (0.3, 1.0, 2.5)
        for top_p in (0.0, 0.5, 0.9, 1.0)
        for top_k in (0, 1, 5, 10_000)
    ]
    made, prompt = program(num_slots=len(draws)), PROMPTS[0]
    [query] = encoder().run([pixels(PICTURES[:1]).numpy()])
    place(made, np.repeat(query, len(draws), axis=0))
    made.slots.reserve(len(prompt) + 1)
    chosen = made.run(prefill_step([prompt] * len(draws), draws, capacity=made.slots.capacity), first_slot=0)
    for _ in range(2):
        wanted = choose(predict(torch.from_numpy(chosen.logits_RV)), draws, upload=torch.tensor)
        assert chosen.best_R.tolist() == wanted.tolist()
        step = decode_step(wanted.tolist(), [len(prompt)] * len(draws), draws, capacity=made.slots.capacity)
        chosen = made.run(step, first_slot=0)


def test_a_row_that_is_not_finite_gives_no_token_and_leaves_others_alone() -> None:
    made = program()
    [query] = encoder().run([pixels(PICTURES[:2]).numpy()])
    good, _ = greedy(made, PROMPTS[:2], query, num_tokens=1)
    for spoilt in (np.nan, np.inf):
        broken = query.copy()
        broken[1] = spoilt
        ids, _ = greedy(made, PROMPTS[:2], broken, num_tokens=1)
        assert ids == [good[0], [-1]]


def test_graphs_share_one_file_of_weights() -> None:
    folder = exported()
    decoder_bytes = sum(4 * tensor.numel() for tensor in embedded().decoder_state.values())
    names = sorted(path.name for path in folder.glob("*.mindir"))
    assert names == ["embedded_inc_graph.mindir", "embedded_prefill_graph.mindir"]
    assert decoder_bytes <= (folder / "embedded_variables" / "data_0").stat().st_size < 1.1 * decoder_bytes
    assert all(path.stat().st_size < 300_000 for path in folder.rglob("*.mindir"))


def test_a_folder_has_what_users_of_mindspore_lite_keep_in_theirs(snapshot: object) -> None:
    folder = exported()
    texts = [(folder / name).read_text() for name in ("embedded.yaml", "config.ini")]
    assert [sorted(path.name for path in folder.iterdir()), *texts] == snapshot


def test_an_export_without_sampling_has_no_inputs_for_it() -> None:
    folder = exported(sampling=False)
    card = read_card(folder)
    assert not card.has_sampling
    made = open_mindir_program(card, folder, MindirRuntime(), num_slots=1)
    [query] = encoder().run([pixels(PICTURES[:1]).numpy()])
    assert greedy(made, PROMPTS[:1], query, num_tokens=8)[0] == greedy(program(), PROMPTS[:1], query, num_tokens=8)[0]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported(), tmp_path / "copy"))


def test_files_of_another_export_are_refused(copied: Path) -> None:
    other = exported("BIAS-TINY")
    name = "embedded_inc_graph.mindir"
    source = next(other.glob("*_inc_graph.mindir"))
    weights = next(other.glob("*_variables"))
    shutil.copy(source, copied / name)
    shutil.copytree(weights, copied / weights.name)
    card = read_card(copied)
    with pytest.raises(GraphError):
        check_files(card, copied)
    with pytest.raises(GraphError):
        open_mindir_program(card, copied, MindirRuntime(), num_slots=1)


@pytest.mark.parametrize("how", ["missing", "cut", "elsewhere", "no graph", "empty"])
def test_damaged_graphs_and_weights_are_refused(copied: Path, how: str) -> None:
    weights, graph = copied / "embedded_variables" / "data_0", copied / "embedded_prefill_graph.mindir"
    if how == "missing":
        weights.unlink()
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:-10_000])
    elif how == "elsewhere":
        graph.write_bytes(graph.read_bytes().replace(b"embedded_variables/data_0", b"../../../../../../etc/foo"))
    else:
        graph.write_bytes(b"" if how == "empty" else b"no graph" * 100)
    with pytest.raises(GraphError) as failure:
        MindirRuntime().open(graph)
    assert str(copied) in failure.value.message


def test_a_graph_cut_anywhere_is_refused_or_reads_as_a_whole(copied: Path) -> None:
    graph = copied / "embedded_prefill_graph.mindir"
    whole = graph.read_bytes()
    for share in (0.1, 0.5, 0.9, 0.999):
        graph.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(GraphError):
            MindirRuntime().open(graph)


def test_inputs_of_other_sizes_are_refused() -> None:
    session = encoder()
    for shape in ((1, 100, 100, 3), (0, 224, 224, 3), (224, 224, 3)):
        with pytest.raises(GraphError):
            session.run([np.zeros(shape, np.float32)])


def test_a_token_beyond_the_window_is_an_error() -> None:
    made = program()
    with pytest.raises(GraphError):
        made.run(prefill_step([[1] * 513], [None], capacity=513), first_slot=0)


def test_force_replaces_an_export_whose_settings_were_edited(tmp_path: Path) -> None:
    out = tmp_path / "exported"
    spec = CaptionerSpec(**model_options())
    job = DecoderJob(spec=spec, out=str(out), format="mindir", encoder=False, compare=False, force=True)
    run_export_decoder(job)
    (out / "config.ini").write_text("[ascend_context]\n")
    run_export_decoder(job)
    (out / "mine.txt").write_text("mine")

    with pytest.raises(UsageError, match=r"`mine\.txt`"):
        run_export_decoder(job)
