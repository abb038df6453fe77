"""The trainable model compared with the production model and the reference: logits, gradients, and its file."""

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter import Captioner, CheckpointError, UsageError
from llama_adapter.app.learning.training.job import ParameterSet, TrainingChoice, TrainJob
from llama_adapter.app.learning.training.model import TrainableModel, open_trainable
from llama_adapter.app.learning.training.results import BUNDLE, trained_spec, write_adapter, write_model
from llama_adapter.app.learning.training.scoring import captioner_of
from llama_adapter.app.learning.training.sources import new_adapter
from llama_adapter.app.models.bundle import convert, load_bundle, save_bundle
from llama_adapter.app.models.checkpoints import LoadedModel, StoredQuestions
from llama_adapter.app.models.random_model import LLAMA_SIZES, decoder_config
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import stored_questions, stream_model
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.llm.training.decoder import SoftLabels
from llama_adapter.llm.training.frozen import find_kernels
from llama_adapter.llm.training.layout import IGNORED, layout_of
from llama_adapter.llm.weights.names import BIASED, LlamaSource, llama_shapes
from llama_adapter.runtime.tensor_files.files import read_tensor_file
from llama_adapter.vision.config import VIT_L_14
from llama_adapter.vision.encoder import encoder_from_state
from llama_adapter.vision.towers import ClipSource
from tests.app.golden import GOLDEN, model_options
from tests.bounds import Float64, difference, largest, spread, unit
from tests.llm.toys import forward
from tests.parity.golden import CASES, GENERATE, pixels, tensors
from tests.parity.test_decoder import loss_limits

CLIP = str(GOLDEN / "CLIP/tiny-vit-torchscript.pt")
ALONE = CaptionerSpec(llama_dir=str(GOLDEN / "LLaMA"), llama_type="TINY")
NEW: dict[str, Any] = {"clip": CLIP, "visual_width": 48, "visual_depth": 2, "visual_heads": 4}
PICTURES = ["shapes_200x300.jpg", "gradient_640x360.png", "gray_150x150.png"]
OTHER_TOKEN = 7
SETS: list[tuple[ParameterSet, ...]] = [("adapter",), ("visual",), ("bias", "lora"), ("bias", "vision", "head")]


def spec(adapter: str = "BIAS-TINY", **changes: Any) -> CaptionerSpec:
    return CaptionerSpec(**{**model_options(adapter), **changes})


def trainable(
    wanted: CaptionerSpec,
    *sets: ParameterSet,
    dtype: torch.dtype = torch.float32,
    has_kernels: bool = True,
    **sizes: Any,
) -> TrainableModel:
    """Open the model like a run does. Without kernels, torch multiplies by frozen weights."""
    kernels = find_kernels("cpu", dtype) if has_kernels else None
    choice = TrainingChoice(sets=sets, **sizes)
    return open_trainable(wanted, choice, dtype=dtype, device="cpu", seed=0, kernels=kernels)


def batch(adapter: str = "BIAS-TINY") -> tuple[Tensor, Tensor, Tensor]:
    """The tokens, labels and pictures of the reference."""
    golden = tensors(f"loss_{adapter}")
    case = next(case for case in CASES["loss"] if case["name"] == adapter)
    labels = golden["labels"]
    return golden["tokens"], labels.masked_fill(labels == 0, IGNORED), pixels(case["images"])


def encoded(model: TrainableModel, pixels_BHWC: Tensor) -> Tensor | None:
    return None if model.encodes == "nothing" else model.encode(pixels_BHWC)


@torch.no_grad()
def logits_of(model: TrainableModel, tokens_BS: Tensor, encoded: Tensor | None) -> Tensor:
    """The logits of all positions: each one has a label if a token follows the last one."""
    longer, decoder = F.pad(tokens_BS, (0, 1)), model.decoder
    hidden_LD = decoder.hidden(longer, model.visual_query(encoded), layout=layout_of(longer, longer))
    return decoder.decoder.logits(hidden_LD.to(decoder.decoder.head.weight.dtype)).view(*tokens_BS.shape, -1)


def production_logits(
    model: LoadedModel, state: dict[str, Tensor], tokens: Tensor, pixels_BHWC: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """The logits of the model as it is loaded, computed in `dtype`."""
    decoder = decoder_from_state(model.decoder_config, state).to(dtype)
    visual_query = torch.zeros(len(tokens), model.decoder_config.num_queries, model.decoder_config.dim, dtype=dtype)
    if model.vision_state:
        visual_query = encoder_from_state(model.vision_config, model.vision_state).to(dtype)(pixels_BHWC)
    return decoder.logits(forward(decoder, tokens, decoder.project_prefix(visual_query)))


def distance(model: TrainableModel, wanted: CaptionerSpec) -> float:
    """The largest difference of the logits of `model` and of `wanted` in float32; it should be at most 1.

    Its unit is the spread of the production model, in which a fault of the trainable one is not counted.
    """
    tokens, _, pictures = batch()
    loaded, stream = stream_model(wanted, dtype=torch.float32)
    state = dict(stream)
    theirs = production_logits(loaded, state, tokens, pictures, dtype=torch.float32)
    with Float64():
        exact = production_logits(loaded, state, tokens, pictures, dtype=torch.float64)
    return difference(logits_of(model, tokens, encoded(model, pictures)), theirs) / spread(theirs, exact)


def step(model: TrainableModel, *, count: int = 4, lr: float = 3e-3) -> list[float]:
    """Run some steps on the reference's batch; returns the losses."""
    tokens, labels, pictures = batch()
    inputs = encoded(model, pictures)
    optimizer = torch.optim.AdamW(model.trained().values(), lr=lr)
    losses = []
    for _ in range(count):
        loss, _ = model(tokens, labels, inputs)
        (loss / (labels[:, 1:] != IGNORED).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def greedy(model: TrainableModel, prompt: list[int], picture: Tensor | None, *, count: int = 12) -> list[int]:
    """The trainable model's greedy answer; each token is computed from all tokens before it."""
    inputs = None if picture is None else model.encode(picture)
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        best = int(logits_of(model, torch.tensor([ids]), inputs)[0, -1].argmax())
        if best == model.tokenizer.eos_id:
            break
        ids.append(best)
    return ids[len(prompt) :]


def answers(options: dict[str, Any], prompt: list[int]) -> list[list[int]]:
    """The answers about the pictures of the model that these options load."""
    with Captioner.load(**options, dtype="float32", exif="ignore", transparency="ignore") as captioner:
        given = [captioner.ask(GOLDEN / "images" / name, prompt, max_new_tokens=12) for name in PICTURES]
    return [list(answer.token_ids) for answer in given]


@pytest.mark.parametrize(
    ("wanted", "sets", "sizes"),
    [
        *((spec(adapter), sets, {}) for adapter in ("BIAS-TINY", "LORA-BIAS-TINY") for sets in SETS),
        (spec("CAPTION-TINY"), ("bias", "lora"), {}),  # without biases
        (spec("training-checkpoint-0", clip=None), ("bias", "lora"), {}),
        (spec("BIAS-TINY", llama_dir=str(GOLDEN / "LLaMA-HF")), ("bias", "lora"), {}),
        (CaptionerSpec(), ("bias", "lora"), {}),
        (ALONE, ("bias", "lora"), NEW),
        (ALONE, ("adapter",), {}),  # for texts
    ],
)
def test_before_the_first_step_it_is_the_model_that_was_opened(
    wanted: CaptionerSpec, sets: tuple[ParameterSet, ...], sizes: dict[str, Any]
) -> None:
    assert distance(trainable(wanted, *sets, **sizes), wanted) <= 1


@pytest.mark.parametrize("name", ["adapter.new_gate", "layers.1.feed_forward_norm.weight"])
def test_a_scale_that_is_wrong_by_a_thousandth_is_more_than_rounding(name: str) -> None:
    model = trainable(CaptionerSpec(), "bias", "lora")
    model.trained()[name].detach().mul_(1.001)
    assert distance(model, CaptionerSpec()) > 2


def test_half_precision_trains_float32_parameters_near_those_of_float32() -> None:
    tokens, labels, pictures = batch("LORA-BIAS-TINY")
    lora = spec("LORA-BIAS-TINY")
    half, exact = (trainable(lora, "bias", "lora", dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    losses = []
    for model in (half, exact):
        loss, _ = model(tokens, labels, model.encode(pictures))
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    other = exact.trained()
    for name, weight in half.trained().items():
        assert weight.dtype == torch.float32
        assert weight.grad is not None
        if weight.numel() > 3:
            assert F.cosine_similarity(weight.grad.flatten(), other[name].grad.flatten(), dim=0) > 0.9, name


@pytest.mark.slow
@pytest.mark.parametrize("sets", SETS, ids="-".join)
@pytest.mark.parametrize("adapter", ["BIAS-TINY", "LORA-BIAS-TINY"])
@pytest.mark.parametrize("has_kernels", [True, False], ids=["kernels", "torch"])
def test_gradients_of_all_that_is_trained_equal_the_reference(
    adapter: str, sets: tuple[ParameterSet, ...], has_kernels: bool
) -> None:
    golden, (tokens, labels, pictures) = tensors(f"loss_{adapter}"), batch(adapter)
    model, limits = trainable(spec(adapter), *sets, has_kernels=has_kernels), loss_limits(adapter)
    for checkpoint_layers in (False, True):
        model.zero_grad()
        model.decoder.checkpoint_layers = checkpoint_layers
        loss, loss_B = model(tokens, labels, model.encode(pictures))
        (loss / (labels[:, 1:] != IGNORED).sum()).backward()
        mean = float(loss.detach() / (labels[:, 1:] != IGNORED).sum())
        assert mean == pytest.approx(float(golden["loss"]), abs=limits["loss"])
        assert float(loss_B.detach().sum()) == pytest.approx(float(loss.detach()), rel=1e-6)
        gradients = reference_gradients(model)
        compared = [name for name in golden if name.startswith("grad/") and name.removeprefix("grad/") in gradients]
        # The reference has no gradients for the tower and the head.
        has_lora = adapter.startswith("LORA")
        counts = {"visual": 3, "adapter": 3 + has_lora, "bias": 10 + has_lora, "lora": 2 * has_lora}
        assert len(compared) == sum(counts.get(name, 0) for name in sets)
        for name in compared:
            ours = gradients[name.removeprefix("grad/")].reshape(golden[name].shape)
            written = unit(ours.dtype) * largest(golden[name])  # gates and factors are written in float16
            assert difference(ours, golden[name]) <= limits[name] + written, name


def reference_gradients(model: TrainableModel) -> dict[str, Tensor]:
    """The gradients under the names of the adapter's file, by writing them in place of the weights."""
    weights = {name: weight.detach().clone() for name, weight in model.trained().items()}
    with torch.no_grad():
        for weight in model.trained().values():
            weight.copy_(weight.grad)
    try:
        written, untrained = model.adapter_tensors(), read_tensor_file(Path(model.sources.adapter.name)).tensors
    finally:
        with torch.no_grad():
            for name, weight in model.trained().items():
                weight.copy_(weights[name])
    return {name: value for name, value in written.items() if not torch.equal(value, untrained.get(name, value * 0))}


@pytest.mark.parametrize("sets", [("bias",), ("bias", "head")], ids="-".join)
def test_the_loss_is_that_of_all_positions_and_rows_add_up(sets: tuple[ParameterSet, ...]) -> None:
    tokens, labels, pictures = batch()
    model = trainable(spec(), *sets)
    inputs = model.encode(pictures)
    logits = logits_of(model, tokens, inputs)[:, :-1].transpose(1, 2)
    wanted_BS, is_labelled_BS = labels[:, 1:], labels[:, 1:] != IGNORED
    of_label_BS, of_other_BS = (
        F.cross_entropy(logits, target_BS, ignore_index=IGNORED, reduction="none")
        for target_BS in (wanted_BS, torch.where(is_labelled_BS, OTHER_TOKEN, IGNORED))
    )
    expected_B = of_label_BS.sum(1)
    cases: list[tuple[SoftLabels | None, Tensor]] = [(None, expected_B)]
    if "head" in sets:  # only then are probabilities learned: here other ones at each position
        wanted_L = wanted_BS[is_labelled_BS]
        share_L = torch.linspace(0, 1, len(wanted_L))
        share_BS = torch.zeros_like(of_label_BS).masked_scatter(is_labelled_BS, share_L)
        token_LK = torch.stack([wanted_L, torch.full_like(wanted_L, OTHER_TOKEN)], dim=1)
        soft = SoftLabels(token_LK, torch.stack([share_L, 1 - share_L], dim=1))
        cases.append((soft, torch.lerp(of_other_BS, of_label_BS, share_BS).sum(1)))
    for learned, wanted_B in cases:
        loss, loss_B = model(tokens, labels, inputs, learned)
        torch.testing.assert_close(loss_B.detach(), wanted_B)
        torch.testing.assert_close(loss.detach(), wanted_B.sum())
    # Padding after a row, and other rows in the batch, change nothing.
    padded = F.pad(tokens[:1], (0, 9)), F.pad(labels[:1], (0, 9), value=IGNORED)
    torch.testing.assert_close(model(*padded, inputs[:1])[0].detach(), expected_B[0])
    nothing, _ = model(tokens, torch.full_like(labels, IGNORED), inputs)
    nothing.backward()
    assert float(nothing.detach()) == 0.0 == float(tensors("loss_BIAS-TINY")["loss_labels_all_zero"])
    assert all(not weight.grad.count_nonzero() for weight in model.trained().values() if weight.grad is not None)


def test_layers_below_the_first_that_is_trained_keep_no_graph() -> None:
    tokens, labels, pictures = batch()
    model, outputs = trainable(spec(), "adapter"), []
    for layer in model.decoder.decoder.layers:
        layer.feed_forward.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.requires_grad))
    model(tokens, labels, model.encode(pictures))
    assert outputs == [False, True, True, True]  # the first layer has no adapter


@pytest.mark.parametrize(("sets", "released"), [(("bias",), "BIAS-TINY"), (("bias", "lora"), "LORA-BIAS-TINY")])
def test_a_new_adapter_is_written_key_for_key_as_the_released_ones(
    sets: tuple[ParameterSet, ...], released: str, tmp_path: Path
) -> None:
    model = trainable(ALONE, *sets, lora_rank=8, **NEW)
    step(model, count=1)
    write_adapter(model, tmp_path / "new.pth")
    written, wanted = (read_tensor_file(path) for path in (tmp_path / "new.pth", adapter_path(released)))
    forms = [{key: (value.shape, value.dtype) for key, value in file.tensors.items()} for file in (written, wanted)]
    assert forms[0] == forms[1]
    assert {key: written.config[key] for key in wanted.config} | {
        "lora_rank": wanted.config["lora_rank"]
    } == wanted.config
    assert torch.load(tmp_path / "new.pth", weights_only=True).keys() == {"model", "config"}


def test_an_adapter_declares_the_questions_that_it_learned(tmp_path: Path) -> None:
    path = tmp_path / "asked.pth"
    model, asked = trainable(spec(), "bias"), StoredQuestions(prompt="Describe it.", question="Which is it?")
    assert stored_questions(spec()) == StoredQuestions() == model.questions, "released files declare none"
    model.questions = asked
    write_adapter(model, path)
    again = dataclasses.replace(spec(), adapter=str(path))
    assert stored_questions(again) == asked == trainable(again, "bias").questions
    folder = convert(again, tmp_path / "bundle", dtype=torch.float32)
    assert stored_questions(CaptionerSpec(model=str(folder))) == asked
    with Captioner.from_spec(again) as captioner:
        assert captioner.info.default_prompt == "Describe it."

    for key, wrong in {"caption_prompt": " ", "question": ["?"]}.items():
        file = torch.load(path, weights_only=True)
        torch.save({**file, "config": {**file["config"], key: wrong}}, tmp_path / "changed.pth")
        with pytest.raises(CheckpointError, match=f"as `{key}`, where a question is wanted"):
            stored_questions(dataclasses.replace(spec(), adapter=str(tmp_path / "changed.pth")))


def adapter_path(name: str) -> Path:
    return GOLDEN / "adapters" / f"{name}.pth"


@pytest.mark.parametrize("trained", ["visual", "vision"])
def test_an_adapter_is_trained_over_a_siglip(trained: ParameterSet, tmp_path: Path) -> None:
    """With the tower itself, the adapter's file has it, with its config."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.SiglipVisionConfig(**sizes, image_size=224, patch_size=56)
    transformers.SiglipVisionModel(config).save_pretrained(tmp_path / "siglip")
    model = trainable(ALONE, "bias", trained, **NEW | {"clip": str(tmp_path / "siglip")})
    step(model, count=2)
    write_adapter(model, tmp_path / "new.pth")

    clip = str(tmp_path / "siglip") if trained == "visual" else None
    wanted = dataclasses.replace(ALONE, adapter=str(tmp_path / "new.pth"), clip=clip)
    bundle = convert(wanted, tmp_path / "bundle", dtype=torch.float32)

    assert model.vision_config.clip.activation == "gelu_tanh"
    assert distance(model, wanted) <= 1
    assert load_bundle(bundle).vision_config == model.vision_config


@pytest.mark.parametrize("base", [ALONE, spec()], ids=["for texts", "with another CLIP"])
def test_a_new_adapter_over_a_bundle_sees_with_the_clip_that_was_named(base: CaptionerSpec, tmp_path: Path) -> None:
    tower = read_tensor_file(Path(CLIP), torchscript=True).tensors
    torch.save({**tower, "visual.class_embedding": 2 * tower["visual.class_embedding"]}, tmp_path / "clip.pt")
    bundle = convert(base, tmp_path / "base", dtype=torch.float32)
    job = TrainJob(
        data=("labels.csv",),
        out=str(tmp_path / "new.pth"),
        spec=CaptionerSpec(llama_dir=str(bundle)),
        choice=TrainingChoice(sets=("bias",), **NEW | {"clip": str(tmp_path / "clip.pt")}),
    )
    model = open_trainable(job.spec, job.choice, dtype=torch.float32, device="cpu", seed=0)
    step(model, count=2)
    write_model(job, model, detector=None)
    for wanted in (trained_spec(job, model), CaptionerSpec(model=str(job.folder / BUNDLE))):
        loaded, _ = stream_model(wanted, dtype=torch.float32)
        assert torch.equal(loaded.vision_state["clip.class_embedding"], model.vision.clip.class_embedding)
        assert distance(model, wanted) <= 1


def test_evaluations_use_the_weights_in_memory(tmp_path: Path) -> None:
    """Read again, those of a bundle of 8 or 4 bits would be a second set of floats."""
    folder = convert(spec(), tmp_path / "bundle", dtype=torch.float32)
    wanted = CaptionerSpec(model=str(folder), exif="ignore", transparency="ignore")
    model = trainable(wanted, "bias")
    step(model)
    shutil.rmtree(folder)
    prompt = GENERATE["bias_b1"]["prompts"][0]["ids"]
    with captioner_of(model, wanted) as captioner:
        answer = captioner.ask(GOLDEN / "images" / PICTURES[0], prompt, max_new_tokens=12)
    assert list(answer.token_ids) == greedy(model, prompt, pixels(PICTURES[:1]))


def test_a_new_adapter_for_7b_has_the_sizes_of_the_release() -> None:
    config = dataclasses.replace(decoder_config(LLAMA_SIZES["7B"]), num_adapter_layers=0, num_queries=0)
    llama = LlamaSource(name="7B", config=config, half_split=False, files=(), tensors={})
    with torch.device("meta"):
        clip = ClipSource(name="CLIP", config=VIT_L_14, tensors={})
        new = new_adapter(llama, TrainingChoice(), clip=clip, seed=0)
    counted = sum(one.numel() for one in (new.queries, *new.visual.values(), *new.llama.values()))
    shapes = llama_shapes(config, biased=BIASED).items()
    copied = sum(math.prod(shape) for name, shape in shapes if "norm" in name or name.endswith(".bias"))
    assert counted + copied == 63_095_552


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "sets"),
    [("BIAS-TINY", ("bias", "lora")), ("LORA-BIAS-TINY", ("bias",)), ("LORA-BIAS-TINY", ("lora",)), (None, ("bias",))],
)
@pytest.mark.proves("training", "CPU")
def test_the_written_adapter_answers_as_the_model_that_was_trained(
    adapter: str | None, sets: tuple[ParameterSet, ...], tmp_path: Path
) -> None:
    model = trainable(ALONE, *sets, **NEW) if adapter is None else trainable(spec(adapter), *sets)
    losses = step(model)
    assert losses[-1] < losses[0]
    write_adapter(model, tmp_path / "trained.pth")
    if adapter is not None:
        before, after = (read_tensor_file(path).tensors for path in (adapter_path(adapter), tmp_path / "trained.pth"))
        is_changed = {name: name not in before or not torch.equal(after[name], before[name]) for name in after}
        assert before.keys() <= after.keys()
        assert any(is_changed.values())
        for name, changed in is_changed.items():
            assert not changed or sets != ("lora",) or ".lora_" in name, name
            assert not changed or sets != ("bias",) or ".lora_" not in name, name
    prompt = GENERATE["bias_b1"]["prompts"][0]["ids"]
    options = model_options() | {"adapter": str(tmp_path / "trained.pth"), "visual_heads": None}  # the file gives 4
    assert answers(options, prompt) == [greedy(model, prompt, pixels([name])) for name in PICTURES]


def test_an_adapter_for_texts_is_written_in_the_form_of_v1(tmp_path: Path) -> None:
    model = trainable(ALONE, "adapter")
    losses = step(model, count=12, lr=0.05)
    assert losses[-1] < losses[0]
    write_adapter(model, tmp_path / "v1.pth")
    gates = {f"layers.{layer}.attention.gate" for layer in range(4)}
    assert read_tensor_file(tmp_path / "v1.pth").tensors.keys() == {"adapter_query.weight", *gates}
    # The published example.py reads the tensors at the top, and loads them with others into its model.
    content = torch.load(tmp_path / "v1.pth", weights_only=True)
    assert content.keys() == {"adapter_query.weight", *gates}
    prompt, again = [1, 5, 9, 200], ALONE_WITH | {"adapter": str(tmp_path / "v1.pth")}
    expected = greedy(model, prompt, None)
    assert expected != greedy(trainable(ALONE, "adapter"), prompt, None)
    with Captioner.load(**again, dtype="float32") as captioner:
        assert list(captioner.generate_text([prompt], max_new_tokens=12)[0].token_ids) == expected
    asked = StoredQuestions(question="What is it?")
    model.questions = asked
    write_adapter(model, tmp_path / "asked.pth")
    content = torch.load(tmp_path / "asked.pth", weights_only=True)
    assert content.keys() == {"adapter_query.weight", *gates, "config"}
    assert stored_questions(CaptionerSpec(**ALONE_WITH | {"adapter": str(tmp_path / "asked.pth")})) == asked
    theirs = torch.nn.Module()
    theirs.adapter_query = torch.nn.Embedding(*content["adapter_query.weight"].shape)
    loaded = theirs.load_state_dict(content, strict=False)
    assert (loaded.missing_keys, set(loaded.unexpected_keys)) == ([], {*gates, "config"})
    assert torch.equal(theirs.adapter_query.weight, content["adapter_query.weight"])
    # Gates of the first release have one value for all heads, which stays so.
    tensors = {"adapter_query.weight": torch.randn(20, 64)}
    tensors |= {f"layers.{layer}.attention.gate": torch.full((1,), 0.3) for layer in range(4)}
    torch.save(tensors, tmp_path / "old.pth")
    old = trainable(CaptionerSpec(**ALONE_WITH, adapter=str(tmp_path / "old.pth")), "adapter")
    assert distance(old, CaptionerSpec(**ALONE_WITH, adapter=str(tmp_path / "old.pth"))) <= 1
    step(old)
    written = old.adapter_tensors()
    assert {name: value.shape for name, value in written.items()} == {name: t.shape for name, t in tensors.items()}
    assert not torch.equal(written["layers.3.attention.gate"], tensors["layers.3.attention.gate"])


ALONE_WITH: dict[str, Any] = {"llama_dir": ALONE.llama_dir, "llama_type": ALONE.llama_type}


@pytest.mark.slow
def test_an_adapter_over_a_bundle_answers_with_the_bundle_as_llama(tmp_path: Path) -> None:
    model = trainable(CaptionerSpec(), "bias", "lora")
    losses = step(model, lr=1e-3)
    assert losses[-1] < losses[0]
    write_adapter(model, tmp_path / "trained.pth")
    prompt = model.tokenizer.encode("What is it?")
    expected = [greedy(model, prompt, pixels([name])) for name in PICTURES]
    over_bundle = {"llama_dir": str(embedded_model()), "adapter": str(tmp_path / "trained.pth")}  # CLIP is the bundle's
    written, tensors = model.loaded_model(torch.float32)
    save_bundle(tmp_path / "bundle", model=written, decoder_tensors=tensors)
    assert load_bundle(tmp_path / "bundle").merged == (*load_bundle(embedded_model()).merged, "lora")
    assert answers(over_bundle, prompt) == answers({"model": str(tmp_path / "bundle")}, prompt) == expected
    # LoRA is merged in the new bundle, so the original LLaMA is lost.
    with pytest.raises(CheckpointError, match="LoRA merged"):
        trainable(CaptionerSpec(model=str(tmp_path / "bundle")), "bias")
    with pytest.raises(CheckpointError, match="LoRA merged"):
        Captioner.load(llama_dir=str(tmp_path / "bundle"), adapter=str(tmp_path / "trained.pth"))


def test_a_bundle_stands_for_its_llama_with_its_biases_and_gates_of_one_are_said(tmp_path: Path) -> None:
    folder = convert(spec(), tmp_path / "bundle", dtype=torch.float32)
    without = spec("CAPTION-TINY", llama_dir=str(folder), llama_type=None)
    assert distance(trainable(without, "bias"), without) <= 1
    bundle = load_bundle(folder)
    bundle.decoder_state["adapter.gates"] = bundle.decoder_state["adapter.gates"].clone()
    bundle.decoder_state["adapter.gates"][0, 1] = -1.0
    save_bundle(folder, model=bundle, overwrite=True)
    model = trainable(CaptionerSpec(model=str(folder)), "bias")
    assert model.notes[0].startswith("1 of the 12 gates of")
    bundle.decoder_state["adapter.gates"][0, 1] = -(1 - 2.0**-12)  # the gate nearest to -1 that is trained
    save_bundle(folder, model=bundle, overwrite=True)
    assert distance(model, CaptionerSpec(model=str(folder))) <= 1


@pytest.mark.parametrize(
    ("wanted", "sets", "sizes", "message"),
    [
        (ALONE, ("bias",), {}, "adaption prompts and gates"),
        (ALONE, ("adapter", "visual"), {}, "adaption prompts and gates"),
        (ALONE, ("visual",), NEW, "gates of a new adapter are closed"),
        (CaptionerSpec(decoder="x"), ("bias",), {}, "exported"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    wanted: CaptionerSpec, sets: tuple[ParameterSet, ...], sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        trainable(wanted, *sets, **sizes)
