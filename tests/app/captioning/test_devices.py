"""Models of each kind answer as on the CPU: on a simulated GPU, in OMs with fakes of Ascend, and on two ranks."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.app.exported import compile_decoder
from tests.app.models_of_each_kind import MODELS, WRITTEN, answers
from tests.fakes.cuda_graphs import install_gpus
from tests.runtime.graphs import conftest

install = conftest.install  # a fixture
MODEL = ("model", "llama_dir", "llama_type", "adapter", "clip", "visual_heads", "context")  # of an export
TOO_LONG = ("LLaMA-Adapter V2 for chat", "prefix tuning")  # prompt or past, for the gears of the tests' OMs
CONVERTED = ("LoRA of PEFT",)  # `convert` merges it; then it is a bundle
OnCpu = Callable[[str], tuple[dict[str, Any], list[Any]]]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> OnCpu:
    """The options of a model by its kind, and its answers on the CPU, which are computed once."""

    @functools.cache
    def on_cpu(kind: str) -> tuple[dict[str, Any], list[Any]]:
        options = {**MODELS, **WRITTEN}[kind](tmp_path_factory.mktemp("model"))
        return options, answers(**options, device="cpu")

    return on_cpu


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("kind", [*MODELS, *WRITTEN])
@pytest.mark.proves("bundles", "Hugging Face LLaMA", "adapters with CLIP inside", "LLaMA without adapter", "CUDA")
@pytest.mark.proves("LLaMA-Adapter V1 for texts", "LLaMA-Adapter V2 for chat", "Meta's 2, 4 and 8 files", "CUDA")
@pytest.mark.proves("prefix tuning", "LoRA of PEFT", "GGUF files", "chat templates", "CUDA")
@pytest.mark.proves("LLaVA, SmolVLM, Idefics3 (pictures as tokens)", "presence and frequency penalties, min-p", "CUDA")
@pytest.mark.proves("answers by JSON schema or regular expression", "CUDA")
def test_models_of_each_kind_answer_as_on_the_cpu(kind: str, on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    options, expected = on_cpu(kind)
    cuda = install_gpus(monkeypatch)

    assert answers(**options, device="cuda:0") == expected
    assert cuda.num_captures() > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in TOO_LONG + CONVERTED])
@pytest.mark.proves("bundles", "Hugging Face LLaMA", "adapters with CLIP inside", "LLaMA without adapter", "OM")
@pytest.mark.proves("LLaMA-Adapter V1 for texts", "Meta's 2, 4 and 8 files", "chat templates", "OM")
@pytest.mark.proves("text without a picture", "repetition penalty", "presence and frequency penalties, min-p", "OM")
@pytest.mark.proves("answers by JSON schema or regular expression", "OM")
def test_exports_of_each_kind_answer_as_the_model(
    kind: str, on_cpu: OnCpu, tmp_path: Path, install: Callable[..., None]
) -> None:
    (options, expected), decoder = on_cpu(kind), tmp_path / "decoder"
    install("")
    compile_decoder(decoder, **{name: value for name, value in options.items() if name in MODEL})

    assert answers(**options, decoder=decoder) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LLaMA-Adapter V2 for chat", "LLaMA-Adapter V1 for texts"])
def test_text_adapters_and_pasts_answer_as_on_one_rank(kind: str, on_cpu: OnCpu, tmp_path: Path) -> None:
    """The past is in front of the prompts of V1."""
    options, expected = on_cpu(kind)
    if "V1" in kind:
        options = {**options, "past_key_values": MODELS["prefix tuning"](tmp_path)["past_key_values"]}
        without, expected = expected, answers(**options, device="cpu")
        assert expected != without, "the past counts"
    assert answers(**options, device="cpu", tensor_parallel=2) == expected
