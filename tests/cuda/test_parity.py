"""The golden models on a GPU, compared with the public reference: visual query, logits and token ids."""

import pytest
import torch

from llama_adapter.llm.model.llama import use_operators
from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.schemes import OperatorChoice
from tests.bounds import difference
from tests.cuda.device import DEVICE, GRAPHS
from tests.parity.golden import ADAPTERS, GENERATE, PICTURES, model, pixels, query_limit, tensors
from tests.parity.test_captioner import answer, load
from tests.parity.test_decoder import WITH_STEPS, logits_along, logits_limit

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def _backend() -> None:
    open_backend(DEVICE)  # convolutions are exact from here on


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_visual_query_is_near_the_reference(adapter: str, dtype: torch.dtype) -> None:
    ours = model(adapter, dtype=dtype, device=DEVICE).encoder(pixels(PICTURES).to(DEVICE))

    assert difference(ours, tensors(f"vision_{adapter}")["visual_query"]) <= query_limit(adapter, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", ["aten", "auto"])
@pytest.mark.parametrize("name", WITH_STEPS)
def test_logits_are_near_the_reference(name: str, wanted: OperatorChoice, dtype: torch.dtype) -> None:
    case = GENERATE[name]
    parts = model(case["adapter"], dtype=dtype, device=DEVICE)
    config = parts.decoder.config
    use_operators(
        parts.decoder, open_backend(DEVICE).choose_operators(config, dtype=dtype, wanted=wanted, mode="eager")
    )
    pairs = logits_along(case, parts, device=DEVICE)

    assert max(difference(ours, golden) for ours, golden in pairs) <= logits_limit(name, dtype=dtype)


@pytest.mark.parametrize("name", list(GENERATE))
@pytest.mark.proves("token ids of the reference", "CUDA")
@pytest.mark.proves("Meta LLaMA and adapter", "CUDA")
@pytest.mark.proves("BIAS adapters", "CUDA")
@pytest.mark.proves("LORA adapters", "CUDA")
@pytest.mark.proves("CAPTION adapters (one query)", "CUDA")
def test_pictures_and_prompts_give_the_texts_of_the_reference(name: str) -> None:
    case = GENERATE[name]
    captioner = load(
        case["adapter"], device=DEVICE, dtype="float32", context=case["max_seq_len"], batch_size=2, mode=GRAPHS
    )

    assert answer(captioner, case, as_ids=False) == list(zip(case["output_ids"], case["output_text"], strict=True))
