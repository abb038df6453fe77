"""Repositories of the Hub: only needed files, the shared cache first, and what to do about refusals."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from llama_adapter.app.models.named.hub_source import HubSource
from llama_adapter.app.models.named.source import DownloadError
from llama_adapter.runtime.errors import UsageError
from tests.app.models.named.conftest import GOLDEN
from tests.fakes.hub import COMMIT, Hub

LLAMA = "huggyllama/llama-7b"
NEEDED = {
    "config.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "tokenizer.model",
}


def fetch(source: HubSource) -> Path:
    return source.fetch(tell=lambda line: None)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("hf:a/b", HubSource(repo="a/b")),
        ("hf:a-1/b.c@v1", HubSource(repo="a-1/b.c", revision="v1")),
        ("hf:a/b@refs%2Fpr%2F1/c/d.pth", HubSource(repo="a/b", revision="refs/pr/1", file="c/d.pth")),
        ("hf:a/b/c.gguf", HubSource(repo="a/b", file="c.gguf")),
        ("hf:a", None),
        ("hf:a/b@", None),
        ("hf:../b", None),
        ("hf:https://a/b", None),
    ],
)
def test_addresses(address: str, expected: HubSource | None) -> None:
    if expected is None:
        with pytest.raises(UsageError, match="no address"):
            HubSource.parse(address)
    else:
        assert HubSource.parse(address) == expected


def test_a_model_arrives_without_what_is_not_needed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    source = HubSource(repo=LLAMA)
    assert source.here() is None
    assert hub.asked == [], "whether it is here is known without a server"
    needed = sum(len(hub.repos[LLAMA][name]) for name in NEEDED)
    assert source.missing().bytes == needed

    folder = fetch(source)

    assert set(os.listdir(folder)) == NEEDED
    assert all((folder / name).read_bytes() == hub.repos[LLAMA][name] for name in NEEDED)
    assert source.here() == folder == HubSource(repo=LLAMA, revision=COMMIT).here()
    assert [check.fault for check in source.check()] == [""] * len(NEEDED)
    assert {token for _, path, _, token in hub.asked if LLAMA in path} == {"Bearer hf_secret"}
    assert source.missing().bytes == 0


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.safetensors", "consolidated.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["open_clip_model.safetensors", "pytorch_model.bin"], ["open_clip_model.safetensors"]),
        (["pytorch_model.bin", "tf_model.h5", "original/consolidated.00.pth"], ["pytorch_model.bin"]),
        *(  # of weights as a file and as shards, the file is read
            ([name, f"{name}.index.json", shard], [name])
            for name, shard in {
                "model.safetensors": "model-00001-of-00001.safetensors",
                "pytorch_model.bin": "pytorch_model-00001-of-00001.bin",
            }.items()
        ),
        (
            ["model.safetensors", "chat_template.jinja", "additional_chat_templates/tools.jinja", "onnx/model.onnx"],
            ["additional_chat_templates/tools.jinja", "chat_template.jinja", "model.safetensors"],
        ),
    ],
)
def test_one_format_is_chosen(names: list[str], expected: list[str], hub: Hub) -> None:
    hub.repos["a/b"] = dict.fromkeys(["config.json", "tokenizer.json", ".gitattributes", *names], b"{}")

    folder = fetch(HubSource(repo="a/b"))

    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {"config.json", "tokenizer.json", *expected}


@pytest.mark.parametrize("weights", ["open_clip_model.safetensors", "open_clip_pytorch_model.bin"])
def test_weights_of_open_clip_arrive_with_their_config(weights: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    config = "open_clip_config.json"
    hub.repos["a/b"] = dict.fromkeys([weights, config, "tokenizer.json", "README.md"], b"{}")
    tower, llama = HubSource(repo="a/b", needs_tokenizer=False), HubSource(repo="a/b")
    folder = fetch(tower)
    assert set(os.listdir(folder)) == {weights, config, "tokenizer.json"}
    assert tower.here() == folder
    assert [check.fault for check in tower.check()] == ["", "", ""]
    assert (llama.here(), [check.fault for check in llama.check()]) == (None, ["missing"])
    with pytest.raises(DownloadError, match=r"read here: config\.json beside safetensors"):
        fetch(llama)

    # Other programs cache the weights alone, which tell neither activation nor heads.
    (folder / config).unlink()
    file = HubSource(repo="a/b", file=weights)
    assert file.here() is None
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert file.here() == folder / weights
    assert fetch(file) == file.here() == folder / weights
    assert (folder / config).is_file()
    assert [check.fault for check in file.check()] == ["", ""]

    hub.repos["a/c"] = hub.repos["a/b"] | {"config.json": b"{}"}
    both = fetch(HubSource(repo="a/c", needs_tokenizer=False))
    assert set(os.listdir(both)) == {"config.json", "tokenizer.json", weights, config}


@pytest.mark.parametrize("folder", ["", "inner/"])
def test_a_file_of_open_clip_is_complete_where_the_repository_has_no_config(folder: str, hub: Hub) -> None:
    file = HubSource(repo="a/b", file=f"{folder}open_clip_pytorch_model.bin")
    hub.repos["a/b"] = {str(file.file): b"weights"}
    assert fetch(file) == file.here()
    assert [check.fault for check in file.check()] == [""]
    with pytest.raises(DownloadError, match=r"config\.json or open_clip_config\.json beside safetensors"):
        fetch(HubSource(repo="a/b", needs_tokenizer=False))


def test_a_file_and_a_bundle_arrive(hub: Hub, tmp_path: Path) -> None:
    hub.repos["a/b"] = {"x/c.pth": b"weights"}
    file = HubSource(repo="a/b", file="x/c.pth")
    assert fetch(file).read_bytes() == b"weights"
    assert file.here() == fetch(file)
    assert [check.fault for check in file.check()] == [""]

    parts = [f"q4/m-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.repos["a/gguf"] = {name: name.encode() for name in parts}
    split = HubSource(repo="a/gguf", file=parts[1])
    assert [path.read_bytes().decode() for path in sorted(fetch(split).parent.iterdir())] == parts
    assert [check.fault for check in split.check()] == ["", ""]
    fetch(split).with_name("m-00001-of-00002.gguf").unlink()
    assert split.here() is None
    assert [check.fault for check in split.check()] == ["missing", ""]

    embedded = GOLDEN.parents[1] / "assets" / "embedded"
    hub.add_folder("a/bundle", embedded)
    folder = fetch(HubSource(repo="a/bundle"))
    assert set(os.listdir(folder)) == set(os.listdir(embedded))
    (folder / "vision.safetensors").unlink()
    assert HubSource(repo="a/bundle").here() is None


@pytest.mark.parametrize("name", ["tokenizer.model", "model-00002-of-00002.safetensors"])
def test_an_incomplete_folder_is_completed(name: str, hub: Hub) -> None:
    source = HubSource(repo=LLAMA)
    folder = fetch(source)
    blob = Path(os.path.realpath(folder / name))
    (folder / name).unlink()
    blob.unlink()

    assert source.here() is None
    assert "missing" in {check.fault for check in source.check()}
    hub.asked.clear()
    assert fetch(source) == folder == source.here()
    asked = [path for method, path, *_ in hub.asked if method == "GET" and "resolve" in path]
    assert [path.rpartition("/")[2] for path in asked] == [name]


def test_cut_connections_are_resumed_and_space_is_looked_at_before(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.repos["a/b"] = {"c.bin": bytes(100_000)}
    hub.cuts = [40_000]
    assert fetch(HubSource(repo="a/b", file="c.bin")).read_bytes() == bytes(100_000)
    assert hub.contents() == (asked := ["", "bytes=40000-"])

    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1000))
    with pytest.raises(DownloadError, match="its disk has 1 kB free"):
        fetch(HubSource(repo=LLAMA))
    assert hub.contents() == asked


def test_damage_is_found_and_removed(hub: Hub) -> None:
    hub.damages = True
    source = HubSource(repo=LLAMA)
    with pytest.raises(DownloadError, match="arrived damaged: not the published"):
        fetch(source)

    hub.damages = False
    folder = fetch(source)
    assert [check.fault for check in source.check()] == [""] * len(NEEDED)
    path = Path(os.path.realpath(folder / "config.json"))
    path.write_bytes(path.read_bytes() + b" ")
    assert [check.fault for check in source.check()].count("not the published Git digest") == 1


GATED = "meta-llama/Llama-3.2-1B-Instruct"


@pytest.mark.parametrize(
    ("source", "token", "said", "advised"),
    [
        (HubSource(repo=GATED), "", "give access on request", f"{GATED}, then log in with `hf auth login`"),
        (HubSource(repo=GATED), "hf_x", "give access on request", "ask for it on"),
        (HubSource(repo="no/where"), "", "does not exist, or is private", "check the name"),
        (HubSource(repo=LLAMA, revision="v9"), "", "has no revision `v9`", "history"),
        (HubSource(repo=LLAMA, file="x.pth"), "", "has no file `x.pth`", "it has README.md, config.json"),
        (HubSource(repo="only/gguf"), "", "has no model of a form", "hf:only/gguf/FILE; it has a-Q4_0.gguf"),
    ],
)
def test_refusals_say_what_to_do(
    source: HubSource, token: str, said: str, advised: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["only/gguf"] = {"a-Q4_0.gguf": b"GGUF"}
    if token:
        monkeypatch.setenv("HF_TOKEN", token)

    with pytest.raises(DownloadError, match=said) as failed:
        fetch(source)

    assert advised in failed.value.hint


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"HF_HUB_OFFLINE": True}, "HF_HUB_OFFLINE forbids it"),
        ({"ENDPOINT": "http://127.0.0.1:9"}, "could not be fetched from the Hub"),
    ],
    ids=["offline", "unreachable"],
)
def test_without_the_hub_the_cache_suffices(
    change: dict[str, Any], said: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HubSource(repo=LLAMA)
    folder = fetch(source)
    for name, value in change.items():
        monkeypatch.setattr(constants, name, value)

    assert source.here() == folder
    with pytest.raises(DownloadError, match=said):
        fetch(HubSource(repo="a/b"))
