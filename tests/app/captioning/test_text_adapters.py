"""Adapters for texts: LLaMA-Adapter V1 with learned keys and values, and V2 for chat with a template of turns.

Adapters for chat have biases and scales of all linear layers, and norms.
"""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter import Captioner, CheckpointError, Dialogue, RawPrompt, UsageError
from llama_adapter.app.command_line.doctor.model import diagnose
from llama_adapter.app.models.bundle import convert
from llama_adapter.app.models.checkpoints import CHAT_CONTEXT, read_encoder
from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder
from llama_adapter.app.models.spec import CaptionerSpec, EncoderSources
from llama_adapter.llm.conversation import format_conversation
from llama_adapter.llm.split import take
from llama_adapter.llm.weights.adapter import open_adapter
from llama_adapter.llm.weights.build import decoder_tensors, plan_decoder
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.runtime.schemes import QUANTISED, Precision
from tests.app.golden import GOLDEN, model_options, picture
from tests.app.models.adapters import DIM, HEADS, LAYERS, chat_adapter, v1_adapter

LLAMA: dict[str, Any] = {"llama_dir": str(GOLDEN / "LLaMA"), "llama_type": "TINY"}
LLAMA_FOLDER = GOLDEN / "LLaMA" / "TINY"
PARAMS = json.loads((LLAMA_FOLDER / "params.json").read_text(encoding="utf-8"))
EPS = PARAMS["norm_eps"]
PROMPTS = [[1, 5, 9, 200], [1, 44, 17]]
Tensors = dict[str, torch.Tensor]
Make = Callable[[Path], Tensors]


def logits_of(adapter: Tensors, token_ids: list[int]) -> torch.Tensor:
    """Next-token logits of a plain float64 LLaMA with an adapter, computed one head at a time.

    Linear layers compute W (scale x) + bias; attention adds gate * softmax(q K_a^T) V_a.
    """
    llama = torch.load(LLAMA_FOLDER / "consolidated.00.pth", weights_only=True)
    w = {name: tensor.double() for name, tensor in {**llama, **adapter}.items()}
    queries = w.get("adapter_query.weight", torch.zeros(0, DIM)).double().view(-1, 10, DIM)
    head_dim = DIM // HEADS

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return (x * w.get(f"{name}_scale", 1)) @ w[f"{name}.weight"].T + w.get(f"{name}_bias", 0)

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
            q_h, k_h = rotated(q[:, part]), rotated(k[:, part])
            scores = q_h @ k_h.T / math.sqrt(head_dim)
            mask = torch.ones_like(scores).triu(1).bool()
            out = scores.masked_fill(mask, -math.inf).softmax(-1) @ v[:, part]
            if (number := layer - (LAYERS - len(queries))) >= 0:
                a_k, a_v = (linear(queries[number], f"{at}attention.{name}")[:, part] for name in ("wk", "wv"))
                gates = w[f"{at}attention.gate"].flatten().expand(HEADS)
                out = out + gates[head] * ((q_h @ a_k.T / math.sqrt(head_dim)).softmax(-1) @ a_v)
            outs.append(out)
        x = x + linear(torch.cat(outs, dim=-1), f"{at}attention.wo")
        h = norm(x, f"{at}ffn_norm")
        up = torch.nn.functional.silu(linear(h, f"{at}feed_forward.w1")) * linear(h, f"{at}feed_forward.w3")
        x = x + linear(up, f"{at}feed_forward.w2")
    return norm(x, "norm")[-1] @ w["output.weight"].T


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    chat_adapter(tmp_path / "chat.pth")
    return tmp_path / "chat.pth"


def load(adapter: Path, **options: Any) -> Captioner:
    return Captioner.load(**LLAMA, adapter=adapter, **options)


def ids(captioner: Captioner, prompts: Any, **options: Any) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in captioner.generate_text(prompts, **{"max_new_tokens": 6, **options})]


@pytest.mark.proves("LLaMA-Adapter V1 for texts", "LLaMA-Adapter V2 for chat", "CPU")
@pytest.mark.parametrize("operators", ["auto", "aten"])
@pytest.mark.parametrize("make", [chat_adapter, v1_adapter, partial(v1_adapter, heads=1)])
def test_an_adapter_answers_as_a_naive_float64_loop(make: Make, operators: str, tmp_path: Path) -> None:
    tensors = make(tmp_path / "adapter.pth")

    with load(tmp_path / "adapter.pth", operators=operators) as captioner, Captioner.load(**LLAMA) as plain:
        answers, without = ids(captioner, PROMPTS), ids(captioner, PROMPTS, text_prefix="none")
        bare, eos_id = ids(plain, PROMPTS), captioner.tokenizer.eos_id

    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected: list[int] = []
        while len(expected) < 6 and (not expected or expected[-1] != eos_id):
            expected.append(int(logits_of(tensors, prompt + expected).argmax()))
        assert list(answer) == [one for one in expected if one != eos_id]
    assert bare != answers
    assert without == (answers if make is chat_adapter else bare)  # only V1 has a prefix


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("make", [None, chat_adapter])
def test_with_fewer_bits_answers_do_not_depend_on_the_batch(
    make: Make | None, precision: Precision, tmp_path: Path
) -> None:
    prompts: list[Any] = ["Name a colour.", RawPrompt("Once upon a time"), *PROMPTS]
    options: dict[str, Any] = {"adapter": tmp_path / "adapter.pth"} if make and make(tmp_path / "adapter.pth") else {}
    with Captioner.load(**LLAMA, **options, precision=precision) as captioner:
        assert ids(captioner, prompts) == [ids(captioner, [prompt])[0] for prompt in prompts]


def test_prompts_are_put_into_the_conversation_and_end_at_its_separator(adapter: Path) -> None:
    with load(adapter) as captioner:
        encode, tokens = captioner.encode_prompt, captioner.tokenizer.encode
        earlier = (("user", "Hello"), ("assistant", "Hi."))

        assert captioner.info.context == CHAT_CONTEXT
        assert encode("Why?").token_ids == tuple(tokens(format_conversation([("user", "Why?")])))
        assert encode(("Why?", "It is red.")).token_ids == tuple(
            tokens(format_conversation([("user", "Why?\nIt is red.")]))
        )
        asked = encode(Dialogue(earlier, "Why?"))
        assert asked.token_ids == tuple(tokens(format_conversation([*earlier, ("user", "Why?")])))
        assert (asked.text, asked.stop) == ("Why?", ("###",))
        for without in (RawPrompt("Why?"), [1, 5, 9]):
            assert encode(without).stop == ()
        assert captioner.generate_text(Dialogue(earlier, "Why?"), max_new_tokens=1)[0].prompt == "Why?"
    with Captioner.load(**model_options()) as captioner:  # its instruction template sees no turns
        asked = captioner.encode_prompt(Dialogue((("system", "Be brief."), *earlier), "Why?"))
        assert (asked.token_ids, asked.stop) == (captioner.encode_prompt("Why?").token_ids, ())


def test_an_answer_ends_at_the_separator_of_the_template(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(adapter) as captioner:
        whole = captioner.generate_text("Why?", max_new_tokens=8)[0].text
    # An untrained model does not write the separator, so a piece of its own output takes that role.
    separator = whole[2:4]
    monkeypatch.setattr("llama_adapter.app.captioning.tasks.prompts.SEPARATOR", separator)
    with load(adapter) as captioner:
        cut = captioner.generate_text("Why?", max_new_tokens=8)[0]

    assert len(separator) == 2
    assert (cut.text, cut.finish) == (whole[: whole.index(separator)], "stop")


@pytest.mark.parametrize(("make", "told"), [(chat_adapter, "for chat"), (v1_adapter, "see pictures|sees no pictures")])
def test_an_adapter_for_texts_sees_no_pictures(make: Make, told: str, tmp_path: Path) -> None:
    make(tmp_path / "adapter.pth")
    sources = CaptionerSpec(**LLAMA, adapter=tmp_path / "adapter.pth")

    assert {finding.level for finding in diagnose(sources)} == {"ok"}
    bundle = convert(sources, tmp_path / "bundle", dtype=torch.float32)
    with load(tmp_path / "adapter.pth") as plain, Captioner.load(bundle, dtype="float32") as stored:
        assert stored.info.template == plain.info.template
        assert ids(stored, ["Why?", *PROMPTS], max_new_tokens=8) == ids(plain, ["Why?", *PROMPTS], max_new_tokens=8)
    with pytest.raises(CheckpointError, match=told):
        read_encoder(EncoderSources(adapter=str(tmp_path / "adapter.pth"), clip=model_options()["clip"]))
    with load(tmp_path / "adapter.pth") as captioner, pytest.raises(UsageError, match=told):
        captioner.caption(picture())


def test_a_text_prefix_is_one_that_the_adapter_learned_and_imagebind_llm_is_told(tmp_path: Path) -> None:
    names = ("image_bind_proj.weight", "image_bind_norm_1.weight", "prefix_query.weight", "llama.norm.weight")
    torch.save({"model": {name: torch.zeros(4, 64) for name in names}}, tmp_path / "7B-beta.pth")
    with pytest.raises(CheckpointError, match="ImageBind"):
        load(tmp_path / "7B-beta.pth")
    v1_adapter(tmp_path / "v1.pth")

    for options, prefix in (
        ({**LLAMA, "adapter": tmp_path / "v1.pth"}, "zeros"),
        (LLAMA, "zeros"),
        (LLAMA, "learned"),
        (model_options(), "learned"),
    ):
        with Captioner.load(**options) as captioner, pytest.raises(ValueError, match=prefix):
            captioner.generate_text("x", text_prefix=prefix)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "changes", "told"),
    [
        (v1_adapter, {"adapter_query.weight": torch.zeros(15, 64)}, "adapter queries"),
        (v1_adapter, {"adapter_query.weight": torch.zeros(20, 32)}, "width 32"),
        (v1_adapter, {"adapter_query.weight": torch.zeros(1000, 64)}, "100 layers"),
        (v1_adapter, {"layers.0.attention.wq.weight": torch.zeros(64, 64)}, "lacks 38 tensors"),
        (v1_adapter, {"layers.1.attention.gate": torch.zeros(1, 3, 1, 1)}, "gate"),
        (v1_adapter, {"layers.99.attention.gate": torch.zeros(1)}, "layers.99"),
        (chat_adapter, {"layers.0.attention.wq_lora": torch.zeros(64)}, "layers.0.attention.wq_lora"),
        (chat_adapter, {"layers.4.attention.wq_bias": torch.zeros(64)}, "5 layers"),
        (chat_adapter, {"layers.1.feed_forward.w2_scale": torch.zeros(64)}, "w2_scale"),
        (chat_adapter, {"layers.1.attention.gate": torch.zeros(1, 3, 1, 1)}, "gate"),
        (chat_adapter, {"adapter_query.weight": torch.zeros(20, 64)}, "adapter_query.weight"),
        (chat_adapter, {"norm.weight": torch.zeros(32)}, "norm.weight"),
        (chat_adapter, {"layers.2.attention.wk_bias": None}, "wk_bias"),  # it is missing
    ],
)
def test_tensors_that_do_not_belong_are_told(
    make: Make, changes: dict[str, torch.Tensor | None], told: str, tmp_path: Path
) -> None:
    tensors = make(tmp_path / "adapter.pth") | changes
    model = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    torch.save({"model": model}, tmp_path / "adapter.pth")

    with pytest.raises(CheckpointError, match=told):
        load(tmp_path / "adapter.pth")


def test_gates_and_the_last_norm_may_be_in_an_adapter_for_chat(tmp_path: Path) -> None:
    extra = {"layers.0.attention.gate": torch.ones(1, HEADS, 1, 1), "norm.weight": torch.ones(DIM) * 2}
    tensors = chat_adapter(tmp_path / "more.pth") | extra
    torch.save({"model": tensors}, tmp_path / "more.pth")
    with load(tmp_path / "more.pth") as captioner:
        answers = ids(captioner, PROMPTS[:1], max_new_tokens=1)
    wanted = int(logits_of(tensors, PROMPTS[0]).argmax())
    assert answers == [() if wanted == captioner.tokenizer.eos_id else (wanted,)]


@pytest.mark.slow
@pytest.mark.proves("LLaMA-Adapter V1 for texts", "LLaMA-Adapter V2 for chat", "ONNX")
@pytest.mark.parametrize("make", [chat_adapter, v1_adapter])
def test_an_exported_adapter_answers_as_torchs(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "adapter.pth")
    spec = CaptionerSpec(**LLAMA, adapter=str(tmp_path / "adapter.pth"))
    run_export_decoder(DecoderJob(spec=spec, out=str(tmp_path / "decoder")))

    with load(tmp_path / "adapter.pth") as torchs, Captioner.load(decoder=tmp_path / "decoder") as exported:
        prompts = ["Why?", Dialogue((("user", "Hello"), ("assistant", "Hi.")), "Why?"), RawPrompt("Once"), *PROMPTS]
        assert ids(exported, prompts, max_new_tokens=8) == ids(torchs, prompts, max_new_tokens=8)
        assert (exported.info.template == "conversation") == (make is chat_adapter)
        assert exported.info.template == torchs.info.template
        with pytest.raises(UsageError):
            exported.caption(picture())


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


def test_a_checkpoint_of_v1s_trainer_holds_the_whole_llama_too(tmp_path: Path) -> None:
    tensors = v1_adapter(tmp_path / "v1.pth")
    llama = torch.load(LLAMA_FOLDER / "consolidated.00.pth", weights_only=True)
    llama |= {"norm.weight": llama["norm.weight"] * 2}
    checkpoint = {**llama, **tensors, "rope.freqs": torch.ones(8)}
    torch.save({"model": checkpoint, "epoch": 4}, tmp_path / "checkpoint-4.pth")
    own = Path(shutil.copytree(LLAMA_FOLDER, tmp_path / "own"))
    shutil.copy(GOLDEN / "LLaMA" / "tokenizer.model", own)
    torch.save(llama, own / "consolidated.00.pth")

    with (
        load(tmp_path / "checkpoint-4.pth") as trained,
        Captioner.load(llama_dir=own, adapter=tmp_path / "v1.pth") as separate,
    ):
        assert ids(trained, PROMPTS, max_new_tokens=8) == ids(separate, PROMPTS, max_new_tokens=8)

    del checkpoint["layers.1.attention.wv.weight"]
    torch.save({"model": checkpoint}, tmp_path / "checkpoint-4.pth")
    with pytest.raises(CheckpointError, match=r"layers\.1\.attention\.wv\.weight"):
        load(tmp_path / "checkpoint-4.pth")
