"""A Hub and a server of releases on the loopback address, empty caches, and a catalogue that names toy files."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_adapter.app.models.named import file_source
from llama_adapter.app.models.named.catalogue import CATALOGUE
from tests.fakes.hub import Hub, serve_hub

GOLDEN = Path(__file__).resolve().parents[3] / "golden"
ADAPTER = GOLDEN / "adapters" / "BIAS-TINY.pth"
PICTURE = GOLDEN / "images" / "shapes_200x300.jpg"
CLIP = GOLDEN / "CLIP" / "tiny-vit-torchscript.pt"


def write_catalogue(folder: Path, hub: Hub) -> Path:
    """A catalogue of the golden checkpoints, as `hub` serves them: `bias-7b`, and a LLaMA of which it needs access."""
    hub.add_folder("huggyllama/llama-7b", GOLDEN / "LLaMA-HF" / "TINY")
    hub.repos["huggyllama/llama-7b"] |= {"pytorch_model.bin": b"the same again", "README.md": b"# LLaMA"}
    hub.add_folder("meta-llama/Llama-3.2-1B-Instruct", GOLDEN / "LLaMA-HF" / "TINY")
    hub.gated.add("meta-llama/Llama-3.2-1B-Instruct")
    text = """
llama:
  llama-7b: {title: LLaMA-7B, hub: huggyllama/llama-7b, bytes: 400000, licence: non-commercial}
  llama-3.2-1b-instruct: {title: Llama 3.2, hub: meta-llama/Llama-3.2-1B-Instruct, licence: Llama 3.2, asks: true}
adapter:
  bias-7b:
    title: BIAS-7B
    url: ADDRESS/releases/DIGEST_BIAS-7B.pth
    sha256: DIGEST
    licence: GPL-3.0
    page: ADDRESS/adapter
    llama: llama-7b
    clip: clip-vit-l-14
    visual_heads: 4
clip:
  clip-vit-l-14: {title: CLIP, url: ADDRESS/clip/ViT-L-14.pt, sha256: CLIP, bytes: 9000, licence: MIT, page: ADDRESS/c}
"""
    digest, clip = (hashlib.sha256(path.read_bytes()).hexdigest() for path in (ADAPTER, CLIP))
    hub.files[f"/releases/{digest}_BIAS-7B.pth"] = ADAPTER.read_bytes()
    hub.files["/clip/ViT-L-14.pt"] = CLIP.read_bytes()
    path = folder / "catalogue.yaml"
    path.write_text(
        text.replace("ADDRESS", hub.address).replace("DIGEST", digest).replace("sha256: CLIP", f"sha256: {clip}")
    )
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The servers; this process and those that it starts use them, and caches in `tmp_path`."""
    from huggingface_hub import constants

    with serve_hub(Hub()) as served:
        cache = tmp_path / "hub"
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name, value in {
            "HF_ENDPOINT": served.address,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            CATALOGUE: str(write_catalogue(tmp_path, served)),
        }.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "LLAMA_ADAPTER_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(file_source, "WAITS_S", (0.0, 0.0))
        yield served
