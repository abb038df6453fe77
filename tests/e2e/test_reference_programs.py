"""Programs in the form of the reference's and the Ascend guide's own, unchanged, with golden checkpoints."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from llama_adapter import Captioner, RawPrompt
from llama_adapter.app.command_line.main import main
from llama_adapter.app.compat.reference import llama
from tests.app.command import run_several
from tests.app.golden import GOLDEN, ROOT, model_options, picture
from tests.fakes.om_format import write_fake_om
from tests.parity.exported import golden_onnx

pytestmark = pytest.mark.slow

PROGRAMS = ROOT / "tests" / "programs"
FAKES = ROOT / "tests" / "fakes"
BIAS = GOLDEN / "adapters" / "BIAS-TINY.pth"
HEADS = ("--visual-heads", "4", "--device", "cpu")
FILES = ("--llama-dir", GOLDEN / "LLaMA", "--llama-type", "TINY", "--adapter", BIAS, "--clip", model_options()["clip"])
NAMES = ["shapes_200x300.jpg", "exif6_160x120.jpg", "noise_128x96.png"]


@pytest.fixture(scope="module")
def captioner() -> Iterator[Captioner]:
    """Reads pictures like OpenCV, except that camera orientation is ignored, as in the stand-in."""
    with Captioner.load(**model_options(), channel_order="bgr", exif="ignore", transparency="ignore") as captioner:
        yield captioner


@pytest.fixture(autouse=True)
def _forget_stand_ins() -> Iterator[None]:
    yield
    sys.modules.pop("cv2", None)


@pytest.fixture
def llama_dir(tmp_path: Path) -> Path:
    """A folder in the form that the programs expect: the tokenizer, and a model named 7B."""
    (tmp_path / "LLaMA").mkdir()
    (tmp_path / "LLaMA" / "7B").symlink_to(GOLDEN / "LLaMA" / "TINY")
    (tmp_path / "LLaMA" / "tokenizer.model").symlink_to(GOLDEN / "LLaMA" / "tokenizer.model")
    return tmp_path / "LLaMA"


@pytest.mark.parametrize("is_exported", [False, True], ids=["CLIP", "exported encoder"])
@pytest.mark.proves("run-reference", "CPU")
def test_the_demo(is_exported: bool, captioner: Captioner, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = ("--encoder", golden_onnx()) if is_exported else FILES[-2:]
    arguments = map(str, (*FILES[:-2], *encoder, *HEADS, PROGRAMS / "demo.py", picture()))

    assert main(["run-reference", *arguments]) == 0

    expected = captioner.generate([picture()], "Describe the image.", max_new_tokens=16)[0].text
    assert capsys.readouterr().out.splitlines() == [expected]


def test_the_evaluation(captioner: Captioner, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CLIP comes from the cache of OpenAI's package, and the adapter from a state dict."""
    monkeypatch.setattr(llama, "CACHED_CLIP", Path(model_options()["clip"]))
    questions = [(picture(name), f"Is there a {what}?", "Yes") for name in NAMES for what in ("star", "circle")]
    (tmp_path / "questions.txt").write_text("\n".join(map("\t".join, questions)))

    code = main(
        [
            *("run-reference", *HEADS, str(PROGRAMS / "evaluate.py")),
            *("--llama_path", str(llama_dir), "--pretrained_path", str(BIAS), "--lora", "0"),
            *("--questions", str(tmp_path / "questions.txt"), "--output_path", str(tmp_path / "answers.txt")),
        ]
    )

    assert code == 0
    lines = [line.split("\t") for line in (tmp_path / "answers.txt").read_text().splitlines()]
    template = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request "
        "using a single word or phrase.\n\n### Instruction:\n{}\n\n### Response:"
    )
    asked = [RawPrompt(template.format(question)) for _, question, _ in questions]
    expected = captioner.generate([path for path, *_ in questions], asked, max_new_tokens=30)
    assert [tuple(line[:3]) for line in lines] == questions
    assert [line[3] for line in lines] == [answer.text for answer in expected]


# `launch` gives the page to a client and does not wait for users.
# It ends without Python's finalisation, which aborts now and then ("terminate called without an active exception") if
# a daemon thread of Gradio's client or server is in C++ code.
ASK_THE_PAGE = """
import os
import sys
import llama_adapter.app.serving.web  # imports Gradio without its stub files, which take long
import gradio
from gradio_client import Client, handle_file
from llama_adapter.app.command_line.main import main

picture, launch = sys.argv.pop(1), gradio.Blocks.launch

def launch_and_ask(page):
    _, address, _ = launch(page, prevent_thread_lock=True, quiet=True)
    asked = (handle_file(picture), "Describe the image.", 16, 0, 0.75)
    print(Client(address, verbose=False).predict(*asked, api_name="/answer"))
    page.close(verbose=False)

gradio.Blocks.launch = launch_and_ask
code = main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""


def test_the_page(captioner: Captioner) -> None:
    arguments = map(str, (picture(), "run-reference", *FILES, *HEADS, PROGRAMS / "gradio_app.py"))
    ran = subprocess.run(
        [sys.executable, "-c", ASK_THE_PAGE, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "GRADIO_ANALYTICS_ENABLED": "False"},
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        captioner.generate([picture()], "Describe the image.", max_new_tokens=16)[0].text
    ]


def golden_om(path: Path, *, batch_size: int) -> Path:
    """A fake OM of BIAS-TINY in the form of `atc`: float16 pixels, a fixed batch, no sidecar."""
    graph = onnx.load(golden_onnx())
    graph.graph.input[0].name = "half"
    graph.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    graph.graph.node.insert(0, onnx.helper.make_node("Cast", ["half"], ["input"], to=onnx.TensorProto.FLOAT))
    header = {
        **{"batch_sizes": [batch_size], "has_gears": False, "soc_version": "Ascend310P3"},
        "input": {"name": "half", "dtype": "float16", "shape": [batch_size, 224, 224, 3]},
        "output": {"name": "output", "dtype": "float32", "shape": [batch_size, 10, 64]},
    }
    write_fake_om(path, header=header, onnx=graph.SerializeToString())
    path.chmod(0o640)
    return path


# As the ModelZoo's own program gives pictures, although its OM takes (B, S, S, 3) and normalises itself.
NORMALISED = """
    scaled = (np.stack(sized) / 255 - (0.48145466, 0.4578275, 0.40821073)) / (0.26862954, 0.26130258, 0.27577711)
    return scaled.transpose(0, 3, 1, 2).astype(np.float16)
"""


def test_the_demo_of_the_ascend_guide(captioner: Captioner, llama_dir: Path, tmp_path: Path) -> None:
    """The program's constants are edited as the guide describes. CLIP is inside the OM."""
    pictures = sorted((GOLDEN / "preprocessed").glob("*.png"))[:4]  # 224 x 224, so that nothing is resized
    for number, path in enumerate(pictures, start=1):
        (tmp_path / f"pic_{number}.png").symlink_to(path)
    places = {
        "/path/to/LLaMA/": llama_dir,
        "/path/to/clip/": golden_om(tmp_path / "clip.om", batch_size=2),
        "/path/to/BIAS-7B": BIAS,
        "/path/to/picture": f"{tmp_path}/",
    }
    source = (PROGRAMS / "demo_bsz.py").read_text()
    for placeholder, place in places.items():
        source = source.replace(f'"{placeholder}"', f'"{place}"')
    plain, normalised = tmp_path / "demo_bsz.py", tmp_path / "normalised.py"
    plain.write_text(source)
    normalised.write_text(source.replace("    return np.stack(sized).astype(np.float16)\n", NORMALISED))
    stand_ins = os.pathsep.join(map(str, (PROGRAMS, FAKES / "ais_bench")))
    commands = [("run-reference", *HEADS, program) for program in (plain, normalised)]

    both = run_several(commands, environ={**os.environ, "PYTHONPATH": stand_ins, "HOME": str(tmp_path)})

    prompt = RawPrompt(llama.format_prompt("Is there a fight in the picture?"))
    expected = [answer.text for answer in captioner.generate(list(map(str, pictures)), prompt, max_new_tokens=12)]
    for ran in both:
        assert ran.code == 0, ran.err
        results = re.findall(r"^\[result\]: (.*)$", ran.out, re.MULTILINE)
        assert results == [str(expected[:2]), str(expected[2:])]
        times = re.findall(r"^\[stages\]: (.*)$", ran.out, re.MULTILINE)[-1].split()
        average = float(re.findall(r"^\[avg_time\]: (.*)$", ran.out, re.MULTILINE)[0])
        assert all(float(time) > 0 for time in times)
        assert sum(map(float, times)) < 3 * average
