"""`export decoder`: what it writes, what it refuses, and what the other commands do with the result."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter import Captioner, CheckpointError, GraphError, UsageError
from llama_adapter.app.models.bundle import convert
from llama_adapter.app.models.checkpoints import StoredQuestions
from llama_adapter.app.models.graph_export import decoder as export
from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import stored_questions
from llama_adapter.llm.exported.card import read_card
from llama_adapter.llm.exported.parity import DecoderParity
from tests.app.command import Run
from tests.app.exported import exported_embedded, exported_golden
from tests.app.golden import GOLDEN, model_flags, model_options, picture
from tests.app.models.bundles import edit_config, edit_manifest
from tests.fakes.exported import without_card
from tests.llm.test_sources_of_families import made

LLAMA = {"llama_dir": str(GOLDEN / "LLaMA"), "llama_type": "TINY"}


def export_to(out: Path, *, model: dict[str, Any] = LLAMA, **options: Any) -> None:
    run_export_decoder(DecoderJob(spec=CaptionerSpec(**model), out=str(out), **options))


def test_the_command_prints_the_folder_and_replaces_it_only_if_told(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "exported"
    flags = ["export", "decoder", *model_flags(), "--out", str(out), "--without-encoder"]

    first = run(flags)
    written = (out / "decoder.json").stat()
    second, third = run(flags), run(flags, "--force")
    sizes = ["--sizes", "R=1,S=8,P=1,T=1", "--sizes", "R=1,S=1,P=8,T=1"]
    compiled = run("export", "om", str(out / "decoder.onnx"), "--soc-version", "Ascend310P3", sizes)

    assert (first.code, second.code, third.code) == (0, 2, 0)
    assert first.out == f"{out}\n"
    assert "39 of 39 tokens are torch's" in first.err
    assert "already" in second.err
    assert (compiled.code, "exported as onnx, and no OM" in compiled.err) == (1, True)
    assert (out / "decoder.json").stat().st_mtime_ns > written.st_mtime_ns
    assert [entry.name for entry in out.parent.iterdir()] == ["exported"]
    assert sorted(read_card(out).files) == sorted(path.name for path in out.iterdir() if path.name != "decoder.json")


def test_force_removes_nothing_but_an_export(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "mine.jpg").write_text("mine")
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "link").symlink_to("later")
    options = {"encoder": False, "compare": False, "force": True}
    for _ in range(2):
        export_to(tmp_path / "link", **options)
    (tmp_path / "later" / "mine.jpg").write_text("mine")

    for name in ("photos", "notes", "link"):
        with pytest.raises(UsageError):
            export_to(tmp_path / name, **options)

    assert [(tmp_path / name).read_text() for name in ("photos/mine.jpg", "notes", "link/mine.jpg")] == ["mine"] * 3
    assert (tmp_path / "link").is_symlink()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["later", "link", "notes", "photos"]


def test_a_decoder_that_differs_from_torch_is_not_kept_and_a_folder_made_during_the_export_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "exported"
    far = DecoderParity(max_abs=0.4, mean_abs=0.1, magnitude=1.0, num_same=3, num_tokens=39)
    monkeypatch.setattr(export, "compare", lambda program, reference: far)
    with pytest.raises(GraphError, match=r"largest difference of logits 4\.0e-01"):
        export_to(out, model=model_options(), encoder=False)
    assert not list(tmp_path.iterdir())

    monkeypatch.setattr(export, "_compare", lambda *given: (out.mkdir(), (out / "mine").write_text("mine")))
    with pytest.raises(UsageError):
        export_to(out)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["exported", "exported/mine"]


def test_without_clip_the_encoder_is_left_out_and_named_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = model_options()
    clip = options.pop("clip")
    out = tmp_path / "exported"

    export_to(out, model=options)

    assert "without the picture encoder: CLIP's weights (--clip) are not at hand" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="holds no CLIP"):
        Captioner.load(decoder=str(out), **options)
    captioner = Captioner.load(decoder=str(out), **options, clip=clip)
    wanted = Captioner.load(**options, clip=clip, dtype="float32")
    assert captioner.caption(picture()).token_ids == wanted.caption(picture()).token_ids


def test_an_encoder_whose_number_of_heads_is_unknown_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="how many heads they have is stored in no file"):
        export_to(tmp_path / "exported", model=model_options() | {"visual_heads": None})


def test_the_card_says_how_an_adapters_tower_reads_pictures_unless_it_is_openais(tmp_path: Path) -> None:
    bundle, out = convert(CaptionerSpec(**model_options()), tmp_path / "bundle", dtype=torch.float32), tmp_path / "out"
    half = [0.5, 0.5, 0.5]
    edit_config("clip", is_squashed=True, rgb_first=True, mean=half, std=half)(bundle)  # as SigLIP
    export_to(out, model={"model": str(bundle)}, compare=False)

    assert read_card(Path(exported_embedded())).vision is None
    foreign = without_card(out / "encoder.onnx", tmp_path / "foreign.onnx")
    wide = picture("shapes_200x300.jpg")
    with Captioner.load(bundle, dtype="float32", device="cpu") as captioner:
        wanted = captioner.pixels, captioner.caption(wide).token_ids
    with Captioner.load(decoder=str(out), encoder=str(foreign)) as captioner:
        assert (captioner.pixels, captioner.caption(wide).token_ids) == wanted
        assert captioner.pixels.is_squashed


def test_a_llama_without_adapter_answers_texts(run: Run, tmp_path: Path) -> None:
    out = str(tmp_path / "exported")
    export_to(Path(out))

    made = run("generate", "--prompt", "Name a colour.", "--decoder", out, "--max-new-tokens", "8")
    wanted = Captioner.load(**LLAMA, dtype="float32").generate_text("Name a colour.", max_new_tokens=8)

    assert json.loads(made.out.splitlines()[-1])["text"] == wanted[0].text
    assert run("caption", picture(), "--decoder", out).code == 2


def test_a_job_goes_on_where_it_stopped(run: Run, tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    flags = [*model_flags(), "--decoder", exported_golden("BIAS-TINY"), "--max-new-tokens", "6", "--out", str(records)]

    first = run("caption", flags, picture())
    second = run("caption", flags, picture(), picture("tiny_10x10.png"))

    assert first.code == second.code == 0
    assert len(records.read_text().splitlines()) == 2
    assert "1 answered by an earlier run" in second.err


def test_a_template_that_is_asked_for_stays_out_of_the_export(run: Run, tmp_path: Path) -> None:
    flags = [*model_flags(), "--prompt-template", "chat", "--without-encoder", "--without-comparison"]

    made = run("export", "decoder", flags, "--out", str(tmp_path / "made"))

    assert made.code == 0
    assert "--prompt-template is left out" in made.err
    assert read_card(tmp_path / "made").template == "instruction"
    for asked, found in ((None, ("instruction", None)), ("conversation", ("conversation", "conversation"))):
        info = Captioner.load(decoder=str(tmp_path / "made"), **model_options(), prompt_template=asked).info
        assert (info.template, info.template_id) == found


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_another_family_is_exported_as_torch_computes_it(run: Run, tmp_path: Path, name: str) -> None:
    made(name, vocab_size=512).save_pretrained(tmp_path / "folder")
    shutil.copy(GOLDEN / "LLaMA" / "tokenizer.model", tmp_path / "folder")
    flags = ["--llama-dir", str(tmp_path / "folder"), "--context", "40", "--out", str(tmp_path / "onnx")]

    ran = run("export", "decoder", *flags)

    assert ran.code == 0
    assert re.search(r"; (\d+) of \1 tokens are torch's", ran.err)


def test_8_bit_bundles_are_exported_with_their_weights(run: Run, tmp_path: Path) -> None:
    bundle, out = str(tmp_path / "bundle"), str(tmp_path / "exported")
    assert run("convert", *model_flags(), "--out", str(tmp_path / "full")).code == 0
    edit_manifest(prompt="Describe it.", question="Which is it?")(tmp_path / "full")
    assert run("quantize", "--model", str(tmp_path / "full"), "--out", bundle).code == 0

    ran = run("export", "decoder", "--model", bundle, "--out", out, "--precision", "int8")

    assert ran.code == 0
    assert "it is exported from full weights, and this model has rounded ones" in ran.err
    assert read_card(Path(out)).precision == "int8"
    asked = stored_questions(CaptionerSpec(decoder=out))
    assert asked == StoredQuestions(prompt="Describe it."), "exports store no other question"
    assert Captioner.load(decoder=out, model=bundle).caption(picture()).token_ids


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rounded_bundles_are_exported_in_floats_too(run: Run, tmp_path: Path, precision: str) -> None:
    """Kernels round inputs of rounded layers as well, and the graph does not: it is compared with plain torch."""
    bundle, out = str(tmp_path / "bundle"), str(tmp_path / "exported")
    assert run("quantize", "--precision", precision, "--out", bundle).code == 0
    ran = run("export", "decoder", "--model", bundle, "--out", out)

    assert ran.code == 0, ran.err
    assert read_card(Path(out)).precision == "float"
    assert "39 of 39 tokens are torch's" in ran.err
