"""Names become paths: of a bundle that fits the memory, or of checkpoints; nothing is fetched without consent."""

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_adapter import Captioner
from llama_adapter.app.compat.pipeline import pipeline
from llama_adapter.app.models.checkpoints import RELEASED_ADAPTERS
from llama_adapter.app.models.named import catalogue, ready
from llama_adapter.app.models.named.catalogue import CATALOGUE, find_parts, read_catalogue
from llama_adapter.app.models.named.getting import Consent, terms
from llama_adapter.app.models.named.located import located, parts_of
from llama_adapter.app.models.named.ready import Numbers
from llama_adapter.app.models.random_model import parse_size
from llama_adapter.runtime.errors import CheckpointError, LlamaAdapterError, TooLittleMemoryError, UsageError
from tests.app.models.named.conftest import ADAPTER, CLIP, PICTURE
from tests.fakes.hub import Hub

COMPUTING = {"device": "cpu", "dtype": "float32", "batch_size": 1}
ALL = {"model": None, "llama_dir": None, "adapter": None, "clip": None, "visual_heads": None}


def locate(consent: Consent = "yes", tell: Any = lambda line: None, **values: Any) -> dict[str, Any]:
    return located({**ALL, **COMPUTING, **values}, consent=consent, tell=tell)


def test_the_catalogue_of_the_package_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CATALOGUE, raising=False)
    found = read_catalogue()

    released = {part.sha256: part for part in found["adapter"].values()}
    assert {digest: part.name for digest, part in released.items()} == {
        digest: name.lower() for digest, name in RELEASED_ADAPTERS.items()
    }
    for part in (*released.values(), *found["clip"].values()):
        assert f"{part.sha256}" in f"{part.url}"
    for name in found["adapter"]:
        assert set(find_parts(name)) == {"llama", "adapter", "clip"}
    for part in found["llama"].values():
        assert part.size is None or parse_size(part.size)
    assert all(part.home.startswith("https://") for name in found["llama"] for part in parts_of(name).values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("llamas: {}", ":1: wanted the sections llama, adapter, clip"),
        ("llama:\n  A B: {}", ":2: A B: wanted a name"),
        ("llama:\n  a: {title: A, licence: x}", ":2: a: wanted either hub or url"),
        ("llama:\n  a: {title: A, licence: x, hub: a/b, bytes: many}", "`bytes` is no key of an entry, or has"),
        ("llama:\n  a: {title: A, licence: x, hub: a/b, name: b}", "`name` is no key"),
        ("clip:\n  a: {title: A, licence: x, url: 'http://a/b', sha256: '12', page: x}", "64 hexadecimal digits"),
        (f"clip:\n  a: {{title: A, licence: x, url: 'http://a/..', sha256: '{'1' * 64}', page: x}}", "the name of a"),
        ("adapter:\n  a: {title: A, licence: x, hub: a/b, llama: c}", "has no llama `c`"),
    ],
)
def test_a_wrong_catalogue_is_refused(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.yaml").write_text(text)
    monkeypatch.setenv(CATALOGUE, str(tmp_path / "own.yaml"))
    with pytest.raises(UsageError) as refused:
        read_catalogue()
    assert said in refused.value.message


def test_paths_come_before_names(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bias-7b").mkdir()
    home = tmp_path / "home"
    (home / "llama-7b").mkdir(parents=True)
    monkeypatch.setenv("LLAMA_ADAPTER_HOME", str(home))

    assert locate(model="bias-7b") == {}
    assert locate(model="llama-7b") == {}
    assert locate(model="unknown") == {}
    assert locate(llama_dir="bias-7b", adapter=str(ADAPTER)) == {}
    assert hub.asked == []
    (file := tmp_path / "a.gguf").touch()  # a LLaMA is a model too
    assert locate(model=str(file)) == {"model": None, "llama_dir": str(file)}
    assert locate(model=str(file), llama_dir="b") == {}, "they exclude each other, and both are shown"
    assert located({"model": str(file)}) == {}, "the command takes no LLaMA"


def test_parts_are_found_by_name_and_address(hub: Hub) -> None:
    found = locate(llama_dir="hf:huggyllama/llama-7b", adapter="BIAS-7B", clip="clip-vit-l-14")

    assert (Path(found["llama_dir"]) / "config.json").is_file()
    assert Path(found["adapter"]).read_bytes() == ADAPTER.read_bytes()
    assert Path(found["clip"]).read_bytes() == CLIP.read_bytes()
    assert found["visual_heads"] == 4
    assert locate(model="llama-7b") == {"model": None, "llama_dir": found["llama_dir"]}
    assert locate(model="hf:huggyllama/llama-7b") == locate(model="llama-7b")
    assert located({"model": "bias-7b", "adapter": None, "clip": None}, from_checkpoints=True) == {
        "model": None,
        **{name: found[name] for name in ("adapter", "clip", "visual_heads")},
    }, "an encoder needs no LLaMA"
    assert terms([found["llama_dir"], found["clip"], "/models--x--y/snapshots/1"]) == (
        f"llama-7b: non-commercial, {hub.address}/huggyllama/llama-7b; "
        f"clip-vit-l-14: MIT, {hub.address}/c; {hub.address}/x/y"
    )


@pytest.mark.parametrize("consent", ["no", "ask"])
def test_nothing_is_fetched_without_consent(consent: Consent, hub: Hub) -> None:
    with pytest.raises(UsageError, match=r"is not on this machine .*: LLaMA-7B; BIAS-7B; CLIP") as refused:
        locate(consent, model="bias-7b")

    assert "llama-adapter get bias-7b" in refused.value.hint
    assert refused.value.exit_code == 2
    assert hub.asked == []
    with pytest.raises(UsageError):
        Captioner.load("bias-7b")
    with pytest.raises(UsageError):
        pipeline("caption", model="hf:huggyllama/llama-7b")


@pytest.mark.parametrize(("answer", "is_fetched"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_a_terminal_is_asked(answer: str, is_fetched: bool, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", said := Terminal())
    if is_fetched:
        assert Path(locate("ask", clip="clip-vit-l-14")["clip"]).is_file()
    else:
        with pytest.raises(LlamaAdapterError, match="Nothing was fetched") as refused:
            locate("ask", clip="clip-vit-l-14")
        assert refused.value.exit_code == 1
    shown = said.getvalue()
    assert f"9 kB  CLIP; MIT: {hub.address}/c\n" in shown
    assert f"9 kB into {os.environ['XDG_CACHE_HOME']}/llama-adapter/weights\n" in shown
    assert ("/clip/ViT-L-14.pt" in [path for method, path, *_ in hub.asked if method == "GET"]) == is_fetched


@pytest.mark.proves("models by name", "CPU")
def test_a_model_is_written_once_and_answers_as_its_checkpoints(hub: Hub) -> None:
    said: list[str] = []
    found = locate(tell=said.append, model="bias-7b")
    paths = locate(llama_dir="llama-7b", adapter="bias-7b", clip="clip-vit-l-14")
    contents = hub.contents()

    assert locate("no", said.append, model="bias-7b") == found
    assert hub.contents() == contents
    assert "It is written once to" in said[-2]
    assert said[-1].startswith("bias-7b in float32: float32 needs 0.")
    manifest = json.loads((Path(found["model"]) / "manifest.json").read_bytes())
    assert f"bias-7b: GPL-3.0, {hub.address}/adapter" in manifest["card"]
    with Captioner.load(**paths, **COMPUTING) as plain, Captioner.load("bias-7b", **COMPUTING) as named:
        assert named.caption(PICTURE, max_new_tokens=8).text == plain.caption(PICTURE, max_new_tokens=8).text
        assert named.info.card == manifest["card"] == plain.info.card


FLOAT, INT8, INT4 = (
    Numbers(precision="float", dtype="bfloat16", bytes=15 * 10**9),
    Numbers(precision="int8", dtype="bfloat16", bytes=9 * 10**9),
    Numbers(precision="int4", dtype="bfloat16", bytes=6 * 10**9),
)


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (20.0, "bias-7b in bfloat16: bfloat16 needs 15.0 GB, and 20.0 GB are free"),
        (12.0, "bias-7b in int8: bfloat16 needs 15.0 GB, and 12.0 GB are free"),
        (7.0, "bias-7b in int4: bfloat16 needs 15.0 GB, and 7.0 GB are free"),
        (5.0, None),
    ],
)
def test_numbers_fit_the_memory(
    free: float, expected: str | None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locate(llama_dir="llama-7b", adapter="bias-7b", clip="clip-vit-l-14")
    backend = ready.open_backend("cpu")
    monkeypatch.setattr(type(backend), "free_bytes", lambda self: int(free * 1e9))
    monkeypatch.setattr(ready, "_candidates", lambda *_, **__: [FLOAT, INT8, INT4])
    said: list[str] = []
    if expected is None:
        with pytest.raises(TooLittleMemoryError, match=r"int4 needs 6.0 GB, and 5.0 GB are free"):
            locate(model="bias-7b")
        return
    folder = Path(locate(tell=said.append, model="bias-7b")["model"])
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert said[-1].startswith(expected)
    assert manifest.get("precision", "float") in folder.name

    monkeypatch.setattr(type(backend), "free_bytes", lambda self: int(30e9))
    assert locate(tell=said.append, model="bias-7b") == {"model": str(folder)}, "what was written is used again"


@pytest.mark.parametrize(("without", "said"), [("clip", "holds no CLIP"), ("visual_heads", "heads")])
def test_what_is_missing_is_found_before_a_bundle_is_begun(
    without: str, said: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = find_parts("bias-7b")
    if without == "clip":
        del parts["clip"]
    else:
        parts["adapter"] = replace(parts["adapter"], visual_heads=None)
    monkeypatch.setattr("llama_adapter.app.models.named.located.find_parts", lambda name: parts)
    lines: list[str] = []

    with pytest.raises(CheckpointError, match=said):
        locate(tell=lines.append, model="bias-7b")

    assert not any("It is written once" in line for line in lines)
    assert not list((Path(os.environ["XDG_CACHE_HOME"]) / "llama-adapter" / "models").iterdir())


def test_7b_needs_what_was_measured_which_is_checked_before_anything_is_fetched(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = find_parts("bias-7b")
    parts["llama"] = replace(parts["llama"], size="7B")
    spec = ready.CaptionerSpec(device="cpu", dtype="bfloat16", batch_size=1)
    backend = ready.open_backend("cpu")

    found = ready._candidates(ready._sizes(parts, dict), spec, backend=backend)

    assert [one.name for one in found] == ["bfloat16", "int8", "int4"]
    measured = (15.2, 9.5, 6.3)  # docs/weights.md; with the program itself
    assert all(0 <= peak - one.bytes / 1e9 < 1.2 for one, peak in zip(found, measured, strict=True))
    monkeypatch.setattr("llama_adapter.app.models.named.located.find_parts", lambda name: parts)
    monkeypatch.setattr(type(backend), "free_bytes", lambda self: 4 * 10**9)
    with pytest.raises(TooLittleMemoryError, match=r"int4 needs 6\.\d GB, and 4\.0 GB are free"):
        locate(model="bias-7b")
    assert hub.asked == []


def test_digests_name_the_bundle(hub: Hub) -> None:
    first = locate(model="bias-7b")["model"]
    hub.files["/clip/other.pt"] = CLIP.read_bytes()
    path = Path(os.environ[CATALOGUE])
    path.write_text(path.read_text().replace("ViT-L-14.pt", "other.pt"))
    catalogue._read.cache_clear()

    assert locate(model="bias-7b")["model"] != first
