"""MindIR graphs of the decoder and the encoder, run by MindSpore, against torch and the reference."""

from pathlib import Path

import numpy as np
import pytest
import torch

from llama_adapter.llm.load import decoder_from_state
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.draw import Draw
from llama_adapter.llm.runners.sampler import choose, predict
from llama_adapter.vision.encoder import encoder_from_state
from llama_adapter.vision.export import BOUNDS, judge
from tests.llm.toys import forward
from tests.mindspore.models import Host, graphs, greedy, loaded
from tests.parity.golden import GENERATE, pixels, tensors

LOGITS_ATOL = 1e-4
PICTURES = ["shapes_200x300.jpg", "shapes_300x200.jpg"]
PROMPTS = [[1, 50, 51, 52, 53, 54], [1, 60, 61], [1, 70, 71, 72, 73, 74, 75, 76, 77]]


def noise(num_pictures: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num_pictures, 224, 224, 3)).astype(np.float32)


def torch_logits(name: str, ids: list[int], visual_query_QD: np.ndarray) -> np.ndarray:
    """Logits (S, V) of all tokens."""
    model = loaded(name)
    decoder = decoder_from_state(model.decoder_config, model.decoder_state)
    prefix: Prefix = decoder.project_prefix(torch.from_numpy(visual_query_QD[None]))
    with torch.inference_mode():
        logits: np.ndarray = decoder.logits(forward(decoder, torch.tensor([ids]), prefix))[0].numpy()
    return logits


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("num_pictures", [1, 3])
def test_the_encoder_gives_the_visual_query_of_torch(dtype: str, num_pictures: int) -> None:
    model, pixels_BHWC = loaded("embedded"), pixels(GENERATE["bias_b3_mixed"]["images"][:num_pictures]).numpy()
    [query] = graphs("embedded", dtype=dtype).encoder.run([pixels_BHWC])
    with torch.inference_mode():
        wanted = encoder_from_state(model.vision_config, model.vision_state)(torch.from_numpy(pixels_BHWC)).numpy()
    assert query.dtype == dtype
    assert judge(query[None], wanted, bound=BOUNDS[dtype]).ok


@pytest.mark.parametrize("name", list(GENERATE))
def test_ids_of_every_golden_case_are_those_of_the_reference(name: str) -> None:
    case = GENERATE[name]
    made = graphs(case["adapter"])
    [query] = made.encoder.run([pixels(case["images"]).numpy()])
    prompts = [prompt["ids"] for prompt in case["prompts"]]
    ids, _ = greedy(made, prompts, query, num_tokens=case["max_gen_len"], window=case["max_seq_len"])
    assert ids == case["output_ids"]


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_of_prefill_and_increments_are_those_of_torch(rows: int) -> None:
    """Prompts of different lengths in one batch."""
    made, prompts = graphs("embedded"), PROMPTS[:rows]
    [query] = made.encoder.run([noise(rows)])
    ids, logits = greedy(made, prompts, query, num_tokens=12, eos_id=-1)
    for row, prompt in enumerate(prompts):
        wanted = torch_logits("embedded", [*prompt, *ids[row]], query[row])
        assert np.abs(np.stack(logits[row]) - wanted[len(prompt) - 1 : -1]).max() < LOGITS_ATOL


def test_float16_logits_stay_near_the_reference() -> None:
    case = GENERATE["bias_b3_mixed"]
    golden = tensors("gen_bias_b3_mixed")
    made = graphs(case["adapter"], dtype="float16")
    [query] = made.encoder.run([pixels(case["images"]).numpy()])
    _, logits = Host(made, query).prefill(
        [[int(i) for i in row[: case["first_chunk_len"]]] for row in golden["tokens"]], []
    )
    assert np.abs(logits - golden["logits"][:, 0].numpy()).max() < 0.14


def test_drawn_tokens_are_those_of_the_sampler() -> None:
    made = graphs("embedded", has_sampling=True)
    [query] = made.encoder.run([noise(1)])
    numbers = np.random.default_rng(1)
    draws: list[Draw | None] = [None]
    draws += [
        Draw(temperature, top_p, top_k, float(numbers.uniform()))
        for temperature in (0.3, 1.0, 2.5)
        for top_p in (0.0, 0.5, 0.9, 1.0)
        for top_k in (0, 1, 5, 10_000)
    ]
    host = Host(made, np.repeat(query, len(draws), axis=0))
    prompts = [PROMPTS[0]] * len(draws)
    tokens, logits = host.prefill(prompts, draws)
    for _ in range(2):
        wanted = choose(predict(torch.from_numpy(logits)), draws, upload=torch.tensor)
        assert tokens.tolist() == wanted.tolist()
        tokens, logits = host.decode(tokens.tolist(), [len(PROMPTS[0])] * len(draws), draws)


def test_a_row_that_is_not_finite_gives_no_token_and_leaves_others_alone() -> None:
    made = graphs("embedded")
    [query] = made.encoder.run([noise(2)])
    good, _ = Host(made, query).prefill(PROMPTS[:2], [])
    for spoilt in (np.nan, np.inf):
        broken = query.copy()
        broken[1] = spoilt
        tokens, _ = Host(made, broken).prefill(PROMPTS[:2], [])
        assert tokens.tolist() == [good[0], -1]


def test_both_graphs_and_the_prefix_share_one_file_of_weights(tmp_path: Path) -> None:
    folder = Path(graphs("embedded").prefill.info.file).parent
    decoder_bytes = sum(4 * tensor.numel() for tensor in loaded("embedded").decoder_state.values())
    assert sorted(path.name for path in folder.glob("*.mindir")) == [
        "model_inc_graph.mindir",
        "model_prefill_graph.mindir",
    ]
    assert decoder_bytes <= (folder / "model_variables" / "data_0").stat().st_size < 1.1 * decoder_bytes
    assert all(path.stat().st_size < 300_000 for path in folder.rglob("*.mindir"))
