"""`get` and names of weights on the command line, with servers on the loopback address; the example of the page."""

import hashlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from time import sleep

import pytest

from llama_adapter.app.command_line.main import main
from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.named import catalogue, ready
from llama_adapter.app.models.named.catalogue import CATALOGUE
from tests.app.golden import ROOT
from tests.app.models.named.conftest import ADAPTER, CLIP, PICTURE, hub
from tests.app.picture_models import save
from tests.fakes.hub import COMMIT, Hub

__all__ = ["hub"]  # a fixture

BLOCK = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)


class Terminal(io.TextIOWrapper):
    """A stream of a terminal."""

    def __init__(self, content: str = "") -> None:
        self.data = io.BytesIO(content.encode())
        super().__init__(self.data, encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        return self.data.getvalue().decode()


@pytest.fixture
def published(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The catalogue of the package, with toy files in place of `bias-7b`; texts of this run, and those of the page."""
    text = Path(catalogue.__file__).with_name("catalogue.yaml").read_text(encoding="utf-8")
    shown = {hub.address: "https://huggingface.co"}
    monkeypatch.setattr("tests.fakes.hub.COMMIT", re.search(r"llama-7b@(\w+)", text)[1])  # type: ignore[index]
    for url, sha256 in re.findall(r"url: (\S+)\n +sha256: (\w+)", text):
        toy = CLIP if url.endswith("ViT-L-14.pt") else ADAPTER
        digest = hashlib.sha256(toy.read_bytes()).hexdigest()
        address = f"{hub.address}/{url.partition('://')[2].replace(sha256, digest)}"
        hub.files[address.removeprefix(hub.address)] = toy.read_bytes()
        text = text.replace(f"url: {url}\n", f"url: {address}\n").replace(f"sha256: {sha256}", f"sha256: {digest}")
        shown |= {digest: sha256} if "_BIAS-7B" in url or toy is CLIP else {}
    llama = sum(len(content) for name, content in hub.repos["huggyllama/llama-7b"].items() if name[0] in "cmt")
    for about, toy_bytes in (("13_477_", llama), ("253_", ADAPTER.stat().st_size), ("933_", CLIP.stat().st_size)):
        text = re.sub(rf"bytes: {about}[\d_]+", f"bytes: {toy_bytes}", text)
    text = text.replace("    size: 7B\n", "").replace("    clip: clip", "    visual_heads: 4\n    clip: clip")
    path = Path(os.environ[CATALOGUE]).with_name("published.yaml")
    path.write_text(text, encoding="utf-8")
    monkeypatch.setenv(CATALOGUE, str(path))
    monkeypatch.setattr(type(ready.open_backend("cpu")), "free_bytes", lambda self: 12 * 10**9)
    return shown | {
        os.environ["HF_HUB_CACHE"]: "~/.cache/huggingface/hub",
        os.environ["XDG_CACHE_HOME"]: "~/.cache",
        str(PICTURE): "photo.jpg",
    }


def transcript(commands: Sequence[str], shown: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What a terminal shows of commands; questions are answered with y."""
    for command in commands:
        screen = Terminal()
        with monkeypatch.context() as terminal:
            terminal.setenv("TERM", "dumb")
            for name in ("stdout", "stderr"):
                terminal.setattr(sys, name, screen)
            terminal.setattr(sys, "stdin", Terminal("y\n"))
            words = shlex.split(command)[1:]
            assert main([str(PICTURE) if word == "photo.jpg" else word for word in words]) == 0, screen.text
        text = screen.text.replace("[y/N] ", "[y/N] y\n")
        for found, replaced in shown.items():
            text = text.replace(found, replaced)
        yield f"$ {command}\n{re.sub(r'-[0-9a-f]{12}', '-4f1c0d7a92be', text)}"


COMMANDS = {
    "models-by-name.md": (
        "llama-adapter get --list",
        "llama-adapter get bias-7b",
        "llama-adapter get --check bias-7b",
        "llama-adapter caption photo.jpg --model bias-7b --max-new-tokens 8",
        "llama-adapter caption photo.jpg --model bias-7b --max-new-tokens 8",
    ),
    "picture-tokens.md": (
        "llama-adapter caption photos --model smolvlm-256m-instruct",
        "llama-adapter ask photos --model smolvlm-256m-instruct --question 'Is there a dog?' --choices yes,no",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_pages_show_what_the_commands_print(
    name: str,
    published: dict[str, str],
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if name == "picture-tokens.md":
        hub.add_folder("HuggingFaceTB/SmolVLM-256M-Instruct", save(tmp_path / "toy", "smolvlm"))
        shutil.copytree(PICTURE.parent, tmp_path / "photos", ignore=lambda _, names: sorted(names)[2:])
        monkeypatch.chdir(tmp_path)
    text = "\n".join(transcript(COMMANDS[name], published, monkeypatch))
    if name == "picture-tokens.md":  # random words, and a size that depends on how transformers writes the toy
        text = re.sub(r"(photos/\S+: )(?!yes|no).*", r"\1...", re.sub(r"\d+ kB", "800 kB", text))
    page = ROOT / "docs" / name
    written = BLOCK.sub(lambda _: text, page.read_text(encoding="utf-8"))
    if request.config.option.update_snapshots:
        page.write_text(written, encoding="utf-8")
    else:
        assert page.read_text(encoding="utf-8") == written


def test_services_fetch_only_with_yes(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    monkeypatch.setattr(sys, "stderr", screen := Terminal())

    assert main(["serve", "--model", "bias-7b", "--port", "0"]) == 2
    assert "`llama-adapter get bias-7b`" in screen.text
    assert hub.asked == []


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("get", 2, "get needs a name"),
        ("get nothing", 2, "The catalogue has no model `nothing`"),
        ("get Bias7b", 2, "`bias-7b` may be meant"),
        ("get --list --check", 2, "--list goes without"),
        ("get hf:nothing", 2, "no address"),
        ("get bias-7b", 2, "get bias-7b`"),
        ("get llama-3.2-1b-instruct --yes", 1, "ask for it on"),
        ("get hf:no/where --yes", 1, "does not exist"),
        ("get --check bias-7b", 1, "missing: "),
        ("caption a.png --model bias-7b", 2, "--yes"),
        ("train data --model llama-7b --out x.pth", 2, "--yes"),
        ("export onnx --adapter bias-7b --clip clip-vit-l-14 --out x.onnx", 2, "--yes"),
        ("quantize --model bias-7b --out x", 2, "`convert --llama-dir NAME"),
        ("convert --llama-dir llama-7b --adapter bias-7b --out x", 2, "--yes"),
    ],
)
def test_what_is_not_here_is_an_error(
    line: str, code: int, said: str, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(line)) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def test_get_prints_paths_and_check_finds_damage(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get", "clip-vit-l-14", "hf:huggyllama/llama-7b/config.json", "--yes"]) == 0
    clip, config = (line.split()[1] for line in capsys.readouterr().out.splitlines())
    assert Path(clip).read_bytes() == CLIP.read_bytes()
    assert Path(config).read_bytes() == hub.repos["huggyllama/llama-7b"]["config.json"]

    assert main(["get", "--check", "clip-vit-l-14"]) == 0
    Path(clip).write_bytes(b"x")
    assert main(["get", "--check", "clip-vit-l-14"]) == 1
    assert capsys.readouterr().out.splitlines() == [f"right: {clip}", f"not the published SHA-256: {clip}"]
    assert COMMIT in config


def test_a_text_base_becomes_a_bundle_that_commands_use(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get", "hf:huggyllama/llama-7b", "--yes"]) == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    manifest = read_manifest(lines["bundle"])
    assert (manifest["vision"], manifest["name"]) == ({}, "llama-7b")
    ask = ["generate", "--model", "hf:huggyllama/llama-7b", "--prompt", "Why?", "--max-new-tokens", "4"]
    assert main(ask) == 0
    assert "llama-7b in float32: float32 needs" in capsys.readouterr().err
    assert [str(path.parent) for path in Path(lines["bundle"]).parent.glob("*/manifest.json")] == [lines["bundle"]]
    few = Path(os.environ["XDG_CACHE_HOME"]) / "few"
    assert main(["quantize", "--model", "hf:huggyllama/llama-7b", "--out", str(few)]) == 0
    assert read_manifest(few)["precision"] == "int8"


def test_a_terminated_download_goes_on_where_it_ended(hub: Hub) -> None:
    command = [sys.executable, "-m", "llama_adapter", "get", "clip-vit-l-14", "--yes"]
    hub.waits = Event()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        part = Path(os.environ["XDG_CACHE_HOME"], "llama-adapter", "weights", "ViT-L-14.pt.part")
        while process.poll() is None and not (part.exists() and part.stat().st_size > 0):
            sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[1].endswith("interrupted\n")
    assert process.returncode == 130
    size = part.stat().st_size
    hub.waits.set()

    assert main(command[3:]) == 0
    assert hub.contents() == ["", f"bytes={size}-"]


@pytest.mark.slow
def test_the_hub_s_variables_count(hub: Hub) -> None:
    command = [sys.executable, "-m", "llama_adapter", "get", "hf:huggyllama/llama-7b", "--yes"]

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **variables})

    offline = run(HF_HUB_OFFLINE="1")
    assert (offline.returncode, hub.asked) == (1, [])
    assert "HF_HUB_OFFLINE forbids it" in offline.stderr
    fetched = run(HF_TOKEN="hf_mine")
    assert fetched.returncode == 0
    assert fetched.stdout.startswith(f"model   {os.environ['HF_HUB_CACHE']}/models--huggyllama--llama-7b/snapshots/")
    assert ("GET", "/api/models/huggyllama/llama-7b", "", "Bearer hf_mine") in hub.asked
