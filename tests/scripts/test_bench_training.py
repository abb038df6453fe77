"""The benchmark of training: its batch, its steps, and its comparison."""

import pytest
import torch

from scripts.bench_training import QUICK, _gain, time_steps
from scripts.peers.huggingface import llama_config
from scripts.training_programs import huggingface_state, open_program, random_batch, random_llama


@pytest.mark.parametrize("program", ["ours", "ours, with pictures"])
def test_steps_are_timed_and_lower_the_loss(program: str) -> None:
    threads = torch.get_num_threads()
    measured = time_steps(program, "float32", threads, QUICK)

    assert measured["step_s"] > 0
    assert measured["last_loss"] < measured["first_loss"]
    assert measured["num_tokens"] <= measured["num_places"]
    factors = 16 * 3 * (4 * (64 + 64) + 3 * (64 + 176))  # rank, layers, matrices of attention and of feed-forward
    assert measured["num_trained"] == factors if program == "ours" else measured["num_trained"] > factors


@pytest.mark.slow
def test_the_loss_is_that_of_transformers_over_the_same_weights() -> None:
    import transformers

    llama, batch = random_llama("tiny"), random_batch(2)
    _, loss_of = open_program("ours", llama, dtype=torch.float32)
    settings = llama_config(llama.config, dtype=torch.float32)
    theirs = transformers.LlamaForCausalLM(settings)
    theirs.load_state_dict(huggingface_state(llama))
    expected = theirs(input_ids=batch.tokens_BS, labels=batch.labels_BS).loss
    assert float(loss_of(batch).detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_the_fastest_of_the_others_is_compared() -> None:
    times = {"ours": 1.0, "ours, with pictures": 0.5, "peft, sdpa": 2.0, "peft, eager": 1.75}
    rows = [{"program": program, "step_s": seconds} for program, seconds in times.items()]

    assert _gain(rows) == {"best": "peft, eager", "gain": 1.75}
