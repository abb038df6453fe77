"""The loop that stands for the reference gives the same answers as our engine, so that only their speed differs."""

import pytest
import torch

from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.devices import open_backend
from scripts.peers.reference import ReferenceLoop
from scripts.peers.sizes import prompt_ids
from scripts.peers.weights import decoder_sizes, decoder_state
from tests.llm.toys import drain, open_runner

NUM_NEW_TOKENS = 8
EOS_ID = 2


@pytest.mark.parametrize("lengths", [(9, 9, 9), (5, 12, 8)], ids=["equal", "ragged"])
def test_the_reference_loop_gives_the_greedy_tokens_of_our_engine(lengths: tuple[int, ...]) -> None:
    config = decoder_sizes("tiny")
    state = decoder_state(config, eos_id=EOS_ID)
    prompts = [tuple(prompt_ids(row, length=length)) for row, length in enumerate(lengths)]
    visual_query_BQD = torch.randn(
        len(prompts), config.num_queries, config.dim, generator=torch.Generator().manual_seed(1)
    )

    loop = ReferenceLoop(state, config, num_rows=len(prompts))
    rows = loop.generate(prompts, visual_query_BQD, num_new_tokens=NUM_NEW_TOKENS)

    engine = Engine(open_runner(config, state, backend=open_backend("cpu"), num_slots=len(prompts)), eos_id=EOS_ID)
    prefixes = engine.project_prefix(visual_query_BQD)
    for index, (prompt, prefix) in enumerate(zip(prompts, prefixes, strict=True)):
        sampling = SamplingParams(max_new_tokens=NUM_NEW_TOKENS)
        engine.submit(GenerateRequest(id=index, prompt_ids=prompt, prefix=prefix, sampling=sampling))
    ours: list[list[int]] = [[] for _ in prompts]
    for output in drain(engine):
        assert output.token_id is not None
        ours[output.request_id].append(output.token_id)

    # Like the reference, the loop ends with its longest row, so rows with shorter prompts get more tokens.
    assert [row[:NUM_NEW_TOKENS] for row in rows] == ours
