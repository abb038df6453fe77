"""The module `llama` gives the reference's answers for the reference's calls."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from llama_adapter import Captioner, RawPrompt
from llama_adapter.app.compat.reference import llama
from llama_adapter.app.compat.reference.pictures import clip_transform
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.errors import CheckpointError, ExitCode, GraphError, LlamaAdapterError, UsageError
from llama_adapter.vision.backends.base import as_array
from tests.app.golden import CASES, GOLDEN, model_options, picture
from tests.bounds import Float64, difference, spread

LLAMA_DIR = GOLDEN / "LLaMA"
BIAS = str(GOLDEN / "adapters" / "BIAS-TINY.pth")
PROMPT = llama.format_prompt("Describe the image.")
STAGES = ("clip", "pre", "forward", "post", "decode")


@pytest.fixture(scope="module", autouse=True)
def _flags() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        flags = {"clip": model_options()["clip"], "visual_heads": 4, "device": "cpu"}
        patch.setattr(llama.LLaMA_adapter, "overrides", flags)
        yield


@pytest.fixture(scope="module")
def bias(_flags: None) -> Any:
    model, _ = llama.load(BIAS, LLAMA_DIR, llama_type="TINY", device="cpu")
    return model


def tensors(*names: str) -> torch.Tensor:
    return torch.stack([clip_transform(Image.open(picture(name))) for name in names])


def ours(**options: Any) -> Captioner:
    return Captioner.load(**model_options(), **options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_texts_are_the_references(case: dict[str, Any]) -> None:
    adapter = str(GOLDEN / "adapters" / f"{case['adapter']}.pth")
    model, preprocess = llama.load(adapter, LLAMA_DIR, case["llama"], max_seq_len=case["max_seq_len"])
    imgs = torch.stack([preprocess(Image.open(picture(name))) for name in case["images"]])
    settings = {"max_gen_len": case["max_gen_len"], "temperature": 0}

    assert model.generate(imgs, [prompt["text"] for prompt in case["prompts"]], **settings) == case["output_text"]
    assert model.generate(imgs, [prompt["ids"] for prompt in case["prompts"]], **settings) == case["output_text"]


def test_floats_between_the_levels_of_a_picture_are_computed_as_they_are(bias: Any) -> None:
    """Augmented tensors: if they were rounded to pixels, the visual query would differ."""
    imgs = tensors("shapes_200x300.jpg") + 0.3 * torch.randn(1, 3, 224, 224, generator=torch.manual_seed(0))
    bias.generate(imgs, [PROMPT], max_gen_len=1)
    captioner = bias._captioner(encodes=False)
    from llama_adapter.app.models.stream_model import stream_model
    from llama_adapter.vision.encoder import encoder_from_state

    model, _ = stream_model(captioner.spec, dtype=torch.float32)
    encoder = encoder_from_state(model.vision_config, model.vision_state)
    with torch.inference_mode():
        wanted = encoder.query(encoder.clip(imgs))
        with Float64():
            double = copy.deepcopy(encoder).double()
            exact = double.query(double.clip(imgs.double()))
        (pixels,) = llama.encoder_pixels(imgs, captioner=captioner)
        found = torch.as_tensor(captioner._vision.encode(pixels[None]))
        rounded = torch.as_tensor(captioner._vision.encode(np.rint(pixels[None]).clip(0, 255).astype(np.uint8)))

    assert difference(found, wanted) <= (limit := spread(wanted, exact))
    assert difference(rounded, wanted) > 10 * limit


@pytest.mark.parametrize("order", ["rgb", "bgr"])
def test_colours_are_in_the_programs_order_whatever_the_model_was_trained_on(
    order: str, bias: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {**llama.LLaMA_adapter.overrides, "channel_order": order}
    monkeypatch.setattr(llama.LLaMA_adapter, "overrides", flags)
    model, _ = llama.load(BIAS, LLAMA_DIR, "TINY")
    imgs = tensors("shapes_200x300.jpg")

    assert model.generate(imgs, [PROMPT], 12, 0) == bias.generate(imgs, [PROMPT], 12, 0)


def test_pictures_are_taken_as_the_captioner_takes_them(bias: Any) -> None:
    paths = [picture("shapes_200x300.jpg"), picture("rgba_180x140.png")]
    expected = [
        answer.text for answer in ours(transparency="ignore").generate(paths, RawPrompt(PROMPT), max_new_tokens=12)
    ]

    assert bias.generate(paths, [PROMPT] * 2, 12, 0) == expected
    assert bias.generate([Image.open(path) for path in paths], [PROMPT] * 2, 12, 0) == expected


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("missing.jpg", "missing.jpg"),
        ("https://pictures.example/star.jpg", "https://pictures.example/star.jpg"),
        (5, "Wanted a path, bytes or a PIL image, got int"),
        (None, "Wanted a path, bytes or a PIL image, got NoneType"),
        (torch.zeros(3, 224, 224), "Wanted a path, bytes or a PIL image, got Tensor"),  # normalised, beside a picture
        (np.zeros((224, 224)), "Wanted a path, bytes or a PIL image, got ndarray"),
    ],
    ids=["missing", "address", "number", "none", "tensor", "grey"],
)
def test_what_is_no_picture_is_refused_in_a_list_of_pictures(image: Any, said: str, bias: Any) -> None:
    with pytest.raises(LlamaAdapterError, match=said) as caught:
        bias.generate([Image.open(picture("shapes_200x300.jpg")), image], [PROMPT] * 2)

    assert caught.value.exit_code == ExitCode.FAILED


def test_an_answer_has_256_tokens_by_default(bias: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def kept(*, max_new_tokens: int, **given: Any) -> SamplingParams:
        lengths.append(max_new_tokens)
        return SamplingParams(max_new_tokens=1, **given)

    monkeypatch.setattr(llama, "SamplingParams", kept)
    bias.generate(tensors("shapes_200x300.jpg"), [PROMPT])

    assert lengths == [256]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: model.generate(), r"LLaMA_adapter\.generate\(\) missing 2 required .* 'imgs' and 'prompts'"),
        (lambda model: model.generate(*"abcdef"), r"generate\(\) takes from 3 to 6 positional arguments but 7"),
        (lambda model: llama.load("a", "b", *"cdefgh"), r"load\(\) takes at most 7 positional arguments, got 8"),
        (lambda model: llama.load("a", "b", width=7), r"^load\(\) got an unexpected keyword argument 'width'"),
    ],
)
def test_messages_about_arguments_name_the_public_calls(call: Any, said: str, bias: Any) -> None:
    with pytest.raises(TypeError, match=said):
        call(bias)


def test_draws_follow_the_seed_of_torch_rows_are_independent_and_each_call_has_its_times(bias: Any) -> None:
    def drawn(seed: int) -> list[str]:
        torch.manual_seed(seed)
        return bias.generate(tensors(*["shapes_200x300.jpg"] * 2), [PROMPT] * 2, max_gen_len=24, temperature=2.0)

    first, second = drawn(1)
    times = [getattr(bias, f"{stage}_time") for stage in STAGES]
    assert drawn(1) == [first, second]
    assert first != second
    assert drawn(2) != [first, second]
    assert min(times) > 0
    assert [getattr(bias, f"{stage}_time") for stage in STAGES] != times  # of the last call, in milliseconds


def test_a_programs_own_context_changes_nothing(bias: Any) -> None:
    imgs = tensors("shapes_200x300.jpg")
    expected = bias.generate(imgs, [PROMPT], 12, 0)

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert bias.generate(imgs.half().float(), [PROMPT], 12, 0) == bias.generate(imgs.half(), [PROMPT], 12, 0)
        assert bias.generate(imgs, [PROMPT], 12, 0) == expected


def test_harmless_calls_and_attributes() -> None:
    model = llama.load(BIAS, LLAMA_DIR, "TINY")  # as in the Ascend guide's port, which returns no pair

    assert model.eval().half().to("cpu").requires_grad_(False) is model
    assert next(model.parameters()).device == model.device == torch.device("cpu")
    assert [type(module) for _, module in model.named_modules()] == [llama.LLaMA_adapter]
    assert [getattr(model, f"{stage}_time") for stage in STAGES] == [0] * 5
    assert model.tokenizer.decode(model.tokenizer.encode("red", bos=True, eos=True)) == "red"
    assert (model.tokenizer.n_words, model.tokenizer.pad_id) == (512, -1)
    with pytest.raises(ValueError, match="not enough"):
        _, _, _ = model


@pytest.mark.parametrize(
    ("imgs", "prompts"),
    [
        (torch.zeros(3, 224, 224), [PROMPT]),
        (torch.zeros(1, 224, 224, 3), [PROMPT]),
        (torch.zeros(1, 3, 336, 336), [PROMPT]),
        (torch.zeros(2, 3, 224, 224), [PROMPT]),
        (torch.zeros(1, 3, 224, 224), PROMPT),
    ],
    ids=["one picture", "layout", "size", "count", "text"],
)
def test_what_does_not_fit_is_refused(imgs: torch.Tensor, prompts: Any, bias: Any, snapshot: Any) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the snapshot has the message
        bias.generate(imgs, prompts)

    assert str(caught.value) == snapshot


# A model that is built by hand, like in the evaluation script


def built(**options: Any) -> Any:
    return llama.LLaMA_adapter(str(LLAMA_DIR / "TINY"), str(LLAMA_DIR / "tokenizer.model"), w_bias=True, **options)


def test_a_model_takes_its_adapter_from_a_state_dict(bias: Any) -> None:
    model = built()
    with pytest.raises(UsageError):
        model.generate(tensors("shapes_200x300.jpg"), [PROMPT])

    found = model.load_state_dict(torch.load(BIAS, map_location="cpu", weights_only=True)["model"], strict=False)

    assert found.missing_keys == found.unexpected_keys == []
    imgs = tensors("shapes_200x300.jpg", "noise_128x96.png")
    assert model.generate(imgs, [PROMPT] * 2, 12, 0) == bias.generate(imgs, [PROMPT] * 2, 12, 0)


def test_tensors_of_something_else_and_another_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        built().load_state_dict({"weight": torch.zeros(2)}, strict=False)
    assert llama.LLaMA_adapter(LLAMA_DIR / "TINY", None).tokenizer.n_words == 512
    (tmp_path / "tokenizer.model").write_bytes(b"no tokenizer")
    with pytest.raises(CheckpointError):
        llama.LLaMA_adapter(LLAMA_DIR / "TINY", tmp_path / "tokenizer.model")


# A session created by the program, as in the Ascend guide


class Session:
    """An InferSession for a model's encoder; it keeps its inputs."""

    def __init__(self, captioner: Captioner, *, width: int = 64) -> None:
        self.encoder, self.width, self.given = captioner._vision, width, list[np.ndarray]()

    def infer(self, feeds: list[np.ndarray]) -> list[np.ndarray]:
        self.given += feeds
        return [as_array(self.encoder.encode(feeds[0].astype(np.float32)))[..., : self.width]]


def test_a_programs_session_encodes_the_pictures_and_clip_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.LLaMA_adapter, "overrides", {"visual_heads": 4})
    monkeypatch.setattr(llama, "CACHED_CLIP", Path("/nowhere/ViT-L-14.pt"))
    captioner = ours()
    names = ["exact_224x224.jpg", "shapes_200x300.jpg"]
    expected = captioner.generate([picture(name) for name in names], RawPrompt(PROMPT), max_new_tokens=12)
    imgs = np.stack([captioner.reader.read(picture(name)).pixels for name in names]).astype(np.float16)
    model, session = llama.load(BIAS, LLAMA_DIR, "TINY", "cpu"), Session(captioner)
    model.init_acl_weight()

    texts = model.generate(session, imgs, [PROMPT] * 2, max_gen_len=12, temperature=0)

    assert texts == [answer.text for answer in expected]
    assert [(feed.dtype, feed.shape) for feed in session.given] == [(np.float16, (2, 224, 224, 3))]
    assert (session.given[0] == imgs).all()
    ids = [
        model.tokenizer.encode(text, bos=False, eos=False)
        for text in model.generate(clip=session, imgs=imgs, prompts=[PROMPT] * 2)
    ]
    assert max(map(len, ids)) <= 2  # one new token; encoding the text again may add a space before it
    with pytest.raises(GraphError):
        model.generate(Session(captioner, width=32), imgs, [PROMPT] * 2)
    with pytest.raises(CheckpointError, match=r"/nowhere/ViT-L-14\.pt"):
        model.generate(tensors(*names), [PROMPT] * 2)


# Which files are loaded


def test_a_released_adapter_is_found_by_its_name(tmp_path: Path) -> None:
    digest = next(digest for digest, name in llama.RELEASED_ADAPTERS.items() if name == "CAPTION-7B")
    for file in (f"{digest}_CAPTION-7B.pth", "CAPTION-7B.pth"):
        place = tmp_path / file
        place.symlink_to(BIAS)
        for name in ("CAPTION-7B", "CAPTION-7B.pth"):
            model = llama.load(name, LLAMA_DIR, llama_type="TINY", download_root=tmp_path)
            assert model._values["adapter"] == str(place)
        place.unlink()
    assert llama.available_models() == ["BIAS-7B", "LORA-BIAS-7B", "CAPTION-7B", "LORA-BIAS-7B-v21"]


@pytest.mark.parametrize("name", ["LORA-BIAS-7B-v21", "BIAS-7B", "mine.pth"])
def test_a_missing_adapter_says_where_to_get_it(name: str, tmp_path: Path, snapshot: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        llama.load(name, LLAMA_DIR, llama_type="TINY", download_root=tmp_path)

    assert f"{caught.value.message}\n{caught.value.hint}".replace(str(tmp_path), "FOLDER") == snapshot


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("cpu",), {}),  # as in earlier versions of the reference, and in the Ascend guide
        (("cpu", "ckpts", 64), {}),
        (("7B", "cpu", "ckpts", 64), {}),
        ((), {"llama_type": "7B", "device": torch.device("cpu"), "phase": "finetune"}),
        (("cpu",), {"llama_type": "7B"}),
        ((), {}),
    ],
)
def test_parameters_of_all_versions_are_taken(arguments: Any, named: Any, tmp_path: Path) -> None:
    (tmp_path / "7B").symlink_to(LLAMA_DIR / "TINY")
    (tmp_path / "tokenizer.model").symlink_to(LLAMA_DIR / "tokenizer.model")

    model = llama.load(BIAS, tmp_path, *arguments, **named)

    assert Path(model._values["llama_dir"]) == tmp_path / "7B"
    assert model._values["context"] == (64 if 64 in arguments else 512)


def test_flags_replace_what_the_program_chooses(monkeypatch: pytest.MonkeyPatch, bias: Any) -> None:
    flags = {name: value for name, value in model_options().items() if value is not None}
    monkeypatch.setattr(llama.LLaMA_adapter, "overrides", {**flags, "device": "cpu", "context": 100})
    imgs = tensors("shapes_200x300.jpg")

    model, _ = llama.load("BIAS-7B", "/path/to/LLaMA", llama_type="7B", device="cuda:7", max_seq_len=32)

    assert model.generate(imgs, [PROMPT], 12, 0) == bias.generate(imgs, [PROMPT], 12, 0)
    assert model._captioner(encodes=False).spec.context == 100


def test_a_bundle_replaces_all_files_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_adapter.app.models.resources import embedded_model, sample_pictures

    monkeypatch.setattr(llama.LLaMA_adapter, "overrides", {"model": str(embedded_model())})
    path = str(sample_pictures() / "12-red-star.jpg")
    model, preprocess = llama.load("BIAS-7B", "/path/to/LLaMA")
    with Captioner.load() as captioner:
        prompt = llama.format_prompt(captioner.info.default_prompt)
        expected = captioner.generate([path])[0].text

    assert model.generate(preprocess(Image.open(path)).unsqueeze(0), [prompt], temperature=-1) == [expected]
