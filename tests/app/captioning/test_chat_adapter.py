"""LLaMA-Adapter V2 for chat: biases and scales of all linear layers, trained norms, and a template with turns."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter import Captioner, CheckpointError, Dialogue, RawPrompt, UsageError
from llama_adapter.app.command_line.doctor.model import diagnose
from llama_adapter.app.models.bundle import convert
from llama_adapter.app.models.checkpoints import CHAT_CONTEXT, ModelSources, read_encoder
from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder
from llama_adapter.llm.conversation import format_conversation
from llama_adapter.llm.split import take
from llama_adapter.llm.weights.adapter import open_adapter
from llama_adapter.llm.weights.build import decoder_tensors, plan_decoder
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.runtime.schemes import QUANTISED, Precision
from tests.app.golden import GOLDEN, model_options, picture
from tests.app.models.adapters import DIM, HEADS, LAYERS, chat_adapter

LLAMA = {"llama_dir": str(GOLDEN / "LLaMA"), "llama_type": "TINY"}
EPS = 1e-6
PROMPTS = [[1, 5, 9, 200], [1, 44, 17]]


def logits_of(adapter: dict[str, torch.Tensor], token_ids: list[int]) -> torch.Tensor:
    """Next-token logits of a plain float64 LLaMA whose linear layers compute W (scale x) + bias."""
    llama = torch.load(GOLDEN / "LLaMA" / "TINY" / "consolidated.00.pth", weights_only=True)
    w = {name: tensor.double() for name, tensor in {**llama, **adapter}.items()}
    head_dim = DIM // HEADS

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return (x * w[f"{name}_scale"]) @ w[f"{name}.weight"].T + w[f"{name}_bias"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * w[f"{name}.weight"]

    def rotated(x: torch.Tensor) -> torch.Tensor:  # (S, head_dim)
        angles = torch.arange(len(x)).double()[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim).double()
        even, odd, cos, sin = x[:, 0::2], x[:, 1::2], angles.cos(), angles.sin()
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(1)

    x = w["tok_embeddings.weight"][token_ids]
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        h = norm(x, f"{at}attention_norm")
        q, k, v = (linear(h, f"{at}attention.{name}") for name in ("wq", "wk", "wv"))
        outs = []
        for head in range(HEADS):
            part = slice(head * head_dim, (head + 1) * head_dim)
            scores = rotated(q[:, part]) @ rotated(k[:, part]).T / math.sqrt(head_dim)
            mask = torch.ones_like(scores).triu(1).bool()
            outs.append(scores.masked_fill(mask, -math.inf).softmax(-1) @ v[:, part])
        x = x + linear(torch.cat(outs, dim=-1), f"{at}attention.wo")
        h = norm(x, f"{at}ffn_norm")
        up = torch.nn.functional.silu(linear(h, f"{at}feed_forward.w1")) * linear(h, f"{at}feed_forward.w3")
        x = x + linear(up, f"{at}feed_forward.w2")
    return norm(x, "norm")[-1] @ w["output.weight"].T


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    chat_adapter(tmp_path / "chat.pth")
    return tmp_path / "chat.pth"


@pytest.mark.proves("LLaMA-Adapter V2 for chat", "CPU")
@pytest.mark.parametrize("operators", ["auto", "aten"])
def test_a_chat_adapter_answers_as_a_naive_float64_loop(operators: Any, tmp_path: Path) -> None:
    tensors = chat_adapter(tmp_path / "chat.pth")

    with Captioner.load(**LLAMA, adapter=tmp_path / "chat.pth", operators=operators) as captioner:
        answers = captioner.generate_text(PROMPTS, max_new_tokens=6)
        eos_id = captioner.tokenizer.eos_id
    with Captioner.load(**LLAMA) as plain:
        bare = plain.generate_text(PROMPTS, max_new_tokens=6)

    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected: list[int] = []
        while len(expected) < 6 and (not expected or expected[-1] != eos_id):
            expected.append(int(logits_of(tensors, prompt + expected).argmax()))
        assert list(answer.token_ids) == [one for one in expected if one != eos_id]
    assert [answer.token_ids for answer in bare] != [answer.token_ids for answer in answers]


@pytest.mark.parametrize("precision", QUANTISED)
def test_a_chat_adapter_answers_with_fewer_bits(precision: Precision, adapter: Path) -> None:
    with Captioner.load(**LLAMA, adapter=adapter, precision=precision) as captioner:
        together = captioner.generate_text(PROMPTS, max_new_tokens=6)
        alone = [captioner.generate_text([prompt], max_new_tokens=6)[0] for prompt in PROMPTS]

    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


def test_prompts_are_put_into_the_conversation_and_end_at_its_separator(adapter: Path) -> None:
    with Captioner.load(**LLAMA, adapter=adapter) as captioner:
        encode, ids = captioner.encode_prompt, captioner.tokenizer.encode
        earlier = (("user", "Hello"), ("assistant", "Hi."))

        assert captioner.info.context == CHAT_CONTEXT
        assert encode("Why?").token_ids == tuple(ids(format_conversation([("user", "Why?")])))
        assert encode(("Why?", "It is red.")).token_ids == tuple(
            ids(format_conversation([("user", "Why?\nIt is red.")]))
        )
        asked = encode(Dialogue(earlier, "Why?"))
        assert asked.token_ids == tuple(ids(format_conversation([*earlier, ("user", "Why?")])))
        assert (asked.text, asked.stop) == ("Why?", ("###",))
        for without in (RawPrompt("Why?"), [1, 5, 9]):
            assert encode(without).stop == ()
        assert captioner.generate_text(Dialogue(earlier, "Why?"), max_new_tokens=1)[0].prompt == "Why?"


def test_an_answer_ends_at_the_separator_of_the_template(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Captioner.load(**LLAMA, adapter=adapter) as captioner:
        whole = captioner.generate_text("Why?", max_new_tokens=8)[0].text
    # An untrained model does not write the separator, so a piece of its own output takes that role.
    separator = whole[2:4]
    monkeypatch.setattr("llama_adapter.app.captioning.tasks.prompts.SEPARATOR", separator)
    with Captioner.load(**LLAMA, adapter=adapter) as captioner:
        cut = captioner.generate_text("Why?", max_new_tokens=8)[0]

    assert len(separator) == 2
    assert (cut.text, cut.finish) == (whole[: whole.index(separator)], "stop")


def test_models_with_the_instruction_template_see_no_turns() -> None:
    with Captioner.load(**model_options()) as captioner:
        encode = captioner.encode_prompt
        turns = (("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi."))

        assert encode(Dialogue(turns, "Why?")).token_ids == encode("Why?").token_ids
        assert encode(Dialogue(turns, "Why?")).stop == ()


def test_a_chat_adapter_sees_no_pictures_and_needs_no_queries(adapter: Path, tmp_path: Path) -> None:
    sources = ModelSources(**LLAMA, adapter=adapter)

    assert {finding.level for finding in diagnose(sources)} == {"ok"}
    with pytest.raises(CheckpointError):
        convert(sources, tmp_path / "bundle")
    with pytest.raises(CheckpointError, match="for chat"):
        read_encoder(adapter, clip=model_options()["clip"])
    with Captioner.load(**LLAMA, adapter=adapter) as captioner, pytest.raises(UsageError, match="for chat"):
        captioner.caption(picture())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layers.0.attention.wq_lora": torch.zeros(64)}, "layers.0.attention.wq_lora"),
        ({"layers.4.attention.wq_bias": torch.zeros(64)}, "5 layers"),
        ({"layers.1.feed_forward.w2_scale": torch.zeros(64)}, "w2_scale"),
        ({"layers.1.attention.gate": torch.zeros(1, 3, 1, 1)}, "gate"),
        ({"adapter_query.weight": torch.zeros(20, 64)}, "adapter_query.weight"),
        ({"norm.weight": torch.zeros(32)}, "norm.weight"),
    ],
)
def test_tensors_that_do_not_belong_are_told(changes: dict[str, torch.Tensor], told: str, tmp_path: Path) -> None:
    chat_adapter(tmp_path / "chat.pth", **changes)

    with pytest.raises(CheckpointError, match=told):
        Captioner.load(**LLAMA, adapter=tmp_path / "chat.pth")


def test_a_missing_tensor_is_told_and_gates_and_the_last_norm_may_be_there(tmp_path: Path) -> None:
    tensors = chat_adapter(tmp_path / "chat.pth")
    lacking = {name: tensor for name, tensor in tensors.items() if name != "layers.2.attention.wk_bias"}
    torch.save({"model": lacking}, tmp_path / "lacking.pth")
    with pytest.raises(CheckpointError, match="wk_bias"):
        Captioner.load(**LLAMA, adapter=tmp_path / "lacking.pth")

    extra = {"layers.0.attention.gate": torch.ones(1, HEADS, 1, 1), "norm.weight": torch.ones(DIM) * 2}
    torch.save({"model": tensors | extra}, tmp_path / "more.pth")
    with Captioner.load(**LLAMA, adapter=tmp_path / "more.pth") as captioner:
        answer = captioner.generate_text([PROMPTS[0]], max_new_tokens=1)[0]
    wanted = int(logits_of(tensors | {"norm.weight": extra["norm.weight"]}, PROMPTS[0]).argmax())
    assert answer.token_ids == (() if wanted == captioner.tokenizer.eos_id else (wanted,))


@pytest.mark.slow
@pytest.mark.proves("LLaMA-Adapter V2 for chat", "ONNX")
def test_an_exported_chat_adapter_answers_as_torchs(adapter: Path, tmp_path: Path) -> None:
    run_export_decoder(DecoderJob(**LLAMA, adapter=str(adapter), out=str(tmp_path / "decoder")))  # type: ignore[arg-type]

    with Captioner.load(**LLAMA, adapter=adapter) as torchs, Captioner.load(decoder=tmp_path / "decoder") as exported:
        prompts: list[Any] = ["Why?", Dialogue((("user", "Hello"), ("assistant", "Hi.")), "Why?"), PROMPTS[0]]
        wanted = torchs.generate_text(prompts, max_new_tokens=8)
        made = exported.generate_text(prompts, max_new_tokens=8)
        assert exported.info.template == torchs.info.template == "conversation"

    assert [answer.token_ids for answer in made] == [answer.token_ids for answer in wanted]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_reads_its_part_of_biases_and_scales(num_ranks: int, adapter: Path) -> None:
    llama, chat = open_meta(GOLDEN / "LLaMA" / "TINY-2SHARD"), open_adapter(adapter, for_texts=True)
    config = plan_decoder(llama, chat, vocab_size=512)
    sources: dict[str, Any] = {"source": llama, "adapter": chat, "dtype": torch.float32}
    whole = dict(decoder_tensors(config, **sources))

    for rank in range(num_ranks):
        share = config.share(rank, num_ranks)
        read = dict(decoder_tensors(config, share=share, **sources))
        for name, tensor in whole.items():
            assert torch.equal(read[name], take(name, tensor, whole=config, share=share)), name
