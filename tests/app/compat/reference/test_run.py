"""`run-reference` runs a program like Python does, with our `llama`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.command_line.main import main
from llama_adapter.app.models.resources import embedded_model
from tests.app.compat.reference.conftest import Program


def test_a_program_sees_what_python_shows_it(program: Program) -> None:
    ran = program(
        "import sys, __main__\nprint(sys.argv, __name__, __file__, __main__.__dict__ is globals(), sys.path[0])",
        *("--clip", "other.pt", "-h", "--", "x"),
    )

    argv, name, file, is_main, folder = re.fullmatch(r"(\[.*\]) (\S+) (\S+) (\S+) (\S+)\n", ran.out).groups()  # type: ignore[union-attr]
    assert argv == "['programs/program.py', '--clip', 'other.pt', '-h', '--', 'x']"
    assert (name, file, is_main, Path(folder).name) == ("__main__", "programs/program.py", "True", "programs")


def test_llama_is_ours_even_beside_the_references_own(program: Program, tmp_path: Path) -> None:
    package = tmp_path / "programs" / "llama"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('the package of the folder')")
    (tmp_path / "programs" / "beside.py").write_text("import llama\nNAME = llama.__name__")

    ran = program(
        "import beside, llama, llama.utils\n"
        "from llama import LLaMA_adapter, Tokenizer, format_prompt, utils\n"
        "from llama.llama_adapter import LLaMA_adapter as by_module, load\n"
        "print(beside.NAME, by_module is LLaMA_adapter, llama.utils.format_prompt is format_prompt)\n"
    )

    assert (ran.code, ran.out) == (0, "llama_adapter.app.compat.reference.llama True True\n")


@pytest.mark.parametrize(
    ("source", "code", "err"),
    [
        ("raise SystemExit", 0, ""),
        ("exit(7)", 7, ""),
        ("exit('no pictures')", 1, "no pictures\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
    ],
)
def test_exit_codes_are_the_programs(source: str, code: int, err: str, program: Program) -> None:
    ran = program(source)

    assert (ran.code, ran.err) == (code, err)


@pytest.mark.parametrize(
    "source",
    [
        "def ask():\n    raise ValueError(7)\n\nask()\n",
        "print('a'\n",
        "import no_such_package\n",
        "from llama import Transformer",
        "import llama\nllama.load('BIAS-7B', 'LLaMA', llama_type='7B')\n",  # of the engine: one sentence and a hint
    ],
    ids=["error", "syntax", "package", "training", "engine"],
)
def test_an_error_of_the_program_is_shown_as_python_shows_it(source: str, program: Program, snapshot: Any) -> None:
    ran = program(source)

    assert ran.code == 1
    assert re.sub(r"\(/.*?/app/", "(app/", ran.err) == snapshot


def test_a_line_of_paddlenlp_runs_as_the_command_that_it_stands_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dev.json").write_text('{"src": "What is a star?", "tgt": "a shape"}\n')
    given = "--device npu --dtype float32 --max_length 24 --data_file dev.json --output_file output.json"
    words = ["python", "predictor.py", "--model_name_or_path", str(embedded_model()), *given.split()]

    assert main(["run-reference", "--device", "cpu", *words]) == 0  # flags before the line replace its own
    (line,) = map(json.loads, (tmp_path / "output.json").read_text().splitlines())
    assert (line["src"], line["tgt"]) == ("What is a star?", "a shape")
    assert line["output"]
    said = capsys.readouterr().err
    assert "device -> computation.device: npu" in said
    assert "runs: llama-adapter generate --prompt-file=dev.json --raw --paddlenlp-out=output.json" in said

    assert main(["run-reference", *words, "--decode_strategy", "beam_search"]) == 2
    assert "PaddleNLP's `decode_strategy` is refused" in capsys.readouterr().err
    assert main(["run-reference", "--device", "cpu", *words, "--lora_path", "no-lora"]) != 0
    assert "`no-lora` is no LoRA folder: it does not exist" in capsys.readouterr().err
    export = ["python", "export_model.py", "--model_name_or_path", "x", "--output_path", "y"]
    assert main(["run-reference", "--dtype", "bfloat16", "--precision", "int8", *export]) != 0  # there is no model x
    said = capsys.readouterr().err
    assert "note: `--dtype bfloat16` is ignored: an export does not need it" in said
    assert "runs: llama-adapter export decoder " in said
    assert " --precision=int8" in said


@pytest.mark.parametrize(
    "launcher",
    [
        "python3",
        "/usr/bin/python3.12 -u -OO",
        "torchrun --nproc_per_node 1",
        "python -m torch.distributed.run --standalone --nproc-per-node=1",
    ],
)
def test_a_launcher_may_be_in_front(launcher: str, program: Program) -> None:
    program("print('ran')")
    assert main(["run-reference", *launcher.split(), "programs/program.py", "--own"]) == 0


@pytest.mark.parametrize("switch", ["-W ignore", "-X dev", "-m", "-Bm", "-c"])
def test_a_switch_with_a_value_is_not_taken_off(switch: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-reference", "python", *switch.split(), "program"]) == 2
    assert f"The program `{switch.split()[0]}` cannot be read" in capsys.readouterr().err
