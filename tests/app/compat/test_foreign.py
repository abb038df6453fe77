"""Settings of other systems: each key is taken, ignored or refused, with its line. No key is dropped silently."""

import re
import tomllib
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.compat import importers
from llama_adapter.app.compat.foreign import import_file, import_line
from llama_adapter.app.compat.imported import Imported
from llama_adapter.app.models.bundle_manifest import INPUT_SCALES
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.llm.exported.card import ExportCard
from llama_adapter.runtime.errors import CheckpointError, UsageError
from llama_adapter.runtime.settings.shown import format_settings
from tests.llm.toys import CONFIG

SETTINGS = Path(__file__).with_name("settings")  # files of the guides; MODEL stands for the model
KEYS = tomllib.loads(Path(importers.__file__).with_name("foreign_keys.toml").read_text(encoding="utf-8"))


def rows(name: str) -> Any:
    """The cases in a file."""
    return yaml.safe_load((SETTINGS / f"{name}.yaml").read_text(encoding="utf-8"))


def text_of(name: str, *, model: object) -> str:
    return (SETTINGS / name).read_text().replace("MODEL", str(model))


def imported(tmp_path: Path, name: str, text: str) -> Imported:
    path = tmp_path / name
    path.write_text(text)
    return import_file(str(path))


def line(words: str | list[str]) -> Imported:
    found = import_line(words.split() if isinstance(words, str) else words)
    assert found is not None
    return found


@pytest.mark.parametrize("system", KEYS)
def test_each_key_has_one_rule_and_no_name_in_the_tables_is_misspelt(system: str) -> None:
    tables = defaultdict(dict, KEYS[system])
    with_notes = [*tables["taken"], *(key for keys in tables["numbers"].values() for key in keys)]
    keys = [*with_notes, *tables["values"], *chain(*tables["devices"].items())]
    keys += [key for name in ("rules", "ignored", "refused") for lists in tables[name].values() for key in lists]
    conditions = {name for row in tables["ignored_if"].values() for name in row["if"]}

    read = {"rules", "devices", "numbers", "taken", "notes", "values", "families", "ignored", "refused", "ignored_if"}
    assert tables.keys() - read == set()
    assert [key for key, count in Counter(keys).items() if count > 1] == []
    assert tables["notes"].keys() - {*with_notes} == set()
    assert conditions - importers._CONDITIONS.keys() - {*keys} == set()


@pytest.mark.parametrize("name", ["gpt.yaml", "predict.yaml", "predict.sh"])
@pytest.mark.proves("settings of other systems", "CPU")
def test_the_documented_example_of_each_system(name: str, tmp_path: Path, snapshot: Any) -> None:
    found = imported(tmp_path, name, text_of(name, model=embedded_model()))

    text = f"{found.format_report()}\n{format_settings(found.settings)}".replace(str(embedded_model()), "MODEL")
    assert text == snapshot
    assert found.refused == ()


def test_settings_of_paddlenlp_as_json_have_lines(tmp_path: Path) -> None:
    text = '{\n"model_name_or_path": "a",\n"prefix_path": "tuned",\n"export_precache": true\n}'
    found = imported(tmp_path, "options.json", text)

    assert found.settings["computation"] == {"past_key_values": "tuned"}
    assert "line 4: export_precache ignored: `prefix_path` says" in found.format_report()


def test_a_command_of_mindformers_reads_its_yaml_and_has_precedence(tmp_path: Path) -> None:
    (tmp_path / "predict.yaml").write_text(text_of("predict.yaml", model="elsewhere"))
    command = (
        "python run_mindformer.py \\\n --config predict.yaml --predict_data 'Hello, world' %s --run_mode predict \\\n"
    )
    for more, prompt in (
        ("", "Hello, world"),
        ("hi 'a b'", ["Hello, world", "hi", "a b"]),
        ("'>50K' 'b|c'", ["Hello, world", ">50K", "b|c"]),
        ("3.10 C# '“Twas the night' '—hello'", ["Hello, world", "3.10", "C#", "“Twas the night", "—hello"]),
    ):
        ended = f"{command % more} > log.txt 2>&1 &\necho done\n"
        found = imported(tmp_path, "run.sh", ended)

        assert found.settings["prompt"] == {"prompt": prompt, "raw": True}
        assert found.settings["computation"]["batch_size"] == 4
    for after in ("echo done", "wait", "fi", "  done < <(ls)", "}", "exit 1", "# the end", "--predict_length 64"):
        command = 'echo "Example: python run_mindformer.py --predict_data no"\n'
        command += f"cd x&python run_mindformer.py --config predict.yaml --predict_data hi\n{after}\n"
        assert imported(tmp_path, "run.sh", command).settings["prompt"]["prompt"] == "hi"


@pytest.mark.parametrize(("text", "expected", "told"), rows("taken"))
def test_what_is_taken(text: str, expected: dict[str, Any], told: str, tmp_path: Path) -> None:
    found = imported(tmp_path, "run.yaml", text)

    assert found.refused == ()
    assert {section: found.settings.get(section, {}) for section in expected} == expected
    assert told in found.format_report()


@pytest.mark.parametrize(("text", "number", "told"), rows("refused"))
def test_what_cannot_be_served_is_refused_with_its_line_and_what_does_it(
    text: str, number: int, told: str, tmp_path: Path
) -> None:
    found = imported(tmp_path, "run.yaml", text)
    refused, *others = found.refused
    assert refused.line == number
    assert told in refused.text
    assert not (told and others)
    with pytest.raises(UsageError, match=f"run.yaml:{number}"):
        found.check("run.yaml")


@pytest.mark.parametrize("name", ["a8w8", "ptq_int8"])
def test_static_bits_run_a_bundle_with_scales_of_inputs(name: str, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    text = f"model_name_or_path: {tmp_path / 'bundle'}\nquant_type: {name}\n"
    before = imported(tmp_path, "run.yaml", text)
    (tmp_path / "bundle" / INPUT_SCALES).touch()

    found = imported(tmp_path, "run.yaml", text)

    assert [entry.outcome for entry in before.report if entry.key == "quant_type"] == (
        ["taken"] if name == "a8w8" else ["refused"]
    )
    assert found.refused == ()
    assert found.settings["computation"] == {"precision": "int8", "operators": "w8a8"}
    assert "with the scales of the bundle" in found.report[-1].text


def test_unknown_and_empty_keys_are_in_the_report(tmp_path: Path) -> None:
    text = "exe_mode: eager\nmodel_path: ''\nunheard_of: {a: 1}\ndata_config: {batch_sise: 2}\n"
    found = imported(tmp_path, "gpt.yaml", text)

    outcomes = [(entry.key, entry.line, entry.outcome) for entry in found.report if entry.outcome != "taken"]
    keys = ("model_path", "unheard_of", "data_config.batch_sise")
    assert outcomes == [(key, line, "ignored") for line, key in enumerate(keys, start=2)]
    assert "`data_config.batch_size`" in found.report[-1].text


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.yaml", b"exe_mode: !!python/object/apply:os.system [ls]", "x.yaml"),
        ("x.yaml", b"only: ours", "the settings of no known system: its keys are only"),
        ("x.yaml", b"model: {model: x}\ngeneration: {seed: 1}", "has our own settings already"),
        ("x.txt", b"run --model_name_or_path caf\xe9", "x.txt"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=told):
        import_file(str(tmp_path / name))


@pytest.mark.parametrize(("text", "told"), rows("wrong_lines"))
def test_a_line_that_is_wrong_or_lacks_something_is_an_error(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        imported(tmp_path, "x.sh", text).check()


LAUNCHED = """\
# two devices
bash scripts/msrun_launcher.sh "python run_mindformer.py \\
--config predict.yaml \\
--run_mode predict \\
--use_parallel True \\
--predict_data 'Hello,
 world'" \\
2
"""


def test_a_launcher_may_be_around_the_line(tmp_path: Path) -> None:
    (tmp_path / "predict.yaml").write_text(text_of("predict.yaml", model="elsewhere"))
    found = imported(tmp_path, "run.sh", LAUNCHED)

    assert found.settings["prompt"]["prompt"] == "Hello,\n world"
    assert found.settings["computation"]["tensor_parallel"] == 2
    lines = {entry.key: entry.line for entry in found.report}
    assert (lines["run_mode"], lines["use_parallel"], lines["predict_data"], lines["worker_num"]) == (4, 5, 6, 8)


@pytest.mark.parametrize(
    ("parallel", "size"), [("{data_parallel: 8}", 2), ("{model_parallel: 4}", 4), ("{model_parallel: 1}", 2)]
)
def test_a_yaml_that_splits_the_model_precedes_the_launchers_number(parallel: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(f"use_parallel: True\nparallel_config: {parallel}\n")
    program = f"run_mindformer.py --config {tmp_path}/p.yaml"
    for words in (
        ["bash", "msrun_launcher.sh", f"python {program}", "2"],
        ["bash", "msrun_launcher.sh", program, "2", "2", "10.0.0.1", "8118", "0", "output/msrun_log", "False", "300"],
        ["torchrun", "--standalone", "--nproc-per-node=2", *program.split()],
        ["python", "-m", "torch.distributed.run", "-r", "3", "--nproc_per_node", "2", *program.split()],
        ["python", "-m", "paddle.distributed.launch", "--gpus", "0,1", *program.split()],
        ["bash", "msrun_launcher.sh", f"{program} > log.txt; echo", "2"],
    ):
        assert line(words).settings["computation"]["tensor_parallel"] == size
    # Options of an unknown script have the number of a launcher too.
    found = imported(tmp_path, "run.sh", "cd x && torchrun --nproc_per_node 2 mine.py x --exe_mode eager")
    assert [entry.key for entry in found.report] == ["worker_num", "exe_mode"]


COPIED = """\
# the text of a page, with prompts
$ CUDA_VISIBLE_DEVICES=0 python predictor.py \\\u00a0
>  --model_name_or_path a \\     # the model
> --dtype\u00a0float16\u00a0--batch_size 2 \\
   > log.txt 2>&1
"""


def test_a_copied_line_may_have_prompts_comments_and_other_blanks(tmp_path: Path) -> None:
    found = imported(tmp_path, "run.sh", COPIED)

    assert {entry.key: entry.line for entry in found.report} == {
        "model_name_or_path": 3,
        "dtype": 4,
        "batch_size": 4,
        "example": None,
    }
    assert line("predictor.py --model_name_or_path a --dtype float16 --batch_size 2").settings == found.settings
    quoted = ("“你好”\u3000世界", "un\u00a0mot", "“un mot", "Oui\u00a0--", "use --x", "a&b", "<path>", "run export.py")
    for text in quoted:
        within = line(["run_mindformer.py", "--run_mode", "predict", "--predict_data", text])
        assert within.settings["prompt"]["prompt"] == text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dtype", "float16", "—batch_size", "2"], "`—batch_size` has a typographic dash"),
        (["—dtype=float16", "--batch_size", "2"], "`—dtype=float16` has a typographic dash"),
        (["--predict_data", "“I", "love", "it”"], "`“I` has a typographic dash or quote"),
        (["--predict_data", "'tis", "[--length", "2]"], "`.--length` has .* another character than a plain space"),
        (["--predict_data", "hi", "\u200b--length", "2"], "another character than a plain space before `--`"),
        (["--dtype\u00a0float16"], "`--dtype\u00a0float16` is no option"),
        (
            ["--dtype", "float16\u00a0--batch_size", "2"],
            "`float16\u00a0--batch_size` has .* another character than a plain",
        ),
    ],
)
def test_words_of_a_page_are_refused_on_the_command_line(words: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        import_line(["python", "predictor.py", *words])
    with pytest.raises(UsageError, match=r"predictor\.py\u00a0--model_name_or_path\u00a0a` has non-breaking spaces"):
        import_line(["python", "predictor.py\u00a0--model_name_or_path\u00a0a", *words])


@pytest.mark.parametrize(("text", "prompt", "length"), rows("shell_lines"))
def test_a_line_is_read_as_by_a_shell(text: str, prompt: str | list[str], length: int | None, tmp_path: Path) -> None:
    found = imported(tmp_path, "run.sh", f"python run_mindformer.py {text}")

    assert (found.settings["prompt"]["prompt"], found.settings["generation"].get("max_length")) == (prompt, length)


@pytest.mark.parametrize(("table", "options", "expected"), rows("options"))
def test_an_option_replaces_its_key_and_no_other(
    table: str, options: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "p.yaml").write_text(table)
    found = imported(tmp_path, "run.sh", f"python run_mindformer.py --config p.yaml {options}\n")

    assert found.refused == ()
    assert {section: found.settings.get(section, {}) for section in expected} == expected


WRONG_MODE = "MindFormers's `context.mode` is refused: wanted 0 (graph) or 1 (eager), got"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--mode 5", f"run.sh:2: {WRONG_MODE} 5"),
        ("--options context.mode=5", f"run.sh:2: {WRONG_MODE} 5"),
        ("--device_target CPU", f"p.yaml:7: {WRONG_MODE} 6"),
        (
            "--mode 1 --adapter_id one",
            "run.sh:2: MindFormers's `adapter_id` is refused: take it out, and name the folder",
        ),
        ("--mode 1 --predict_data", "run.sh:2: MindFormers's `predict_data` is refused: wanted a text, got none"),
    ],
)
def test_a_refused_key_has_its_line_in_its_file(options: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("\n\n\n\ncontext:\n  device_id: 1\n  mode: 6\nseed: 0\n")
    found = imported(tmp_path, "run.sh", f"python run_mindformer.py --config p.yaml \\\n{options}\n")
    with pytest.raises(UsageError, match=re.escape(told)):
        found.check("run.sh")
    assert f"{tmp_path}/p.yaml:8: seed ignored" in found.format_report()


def test_lines_of_exports_become_export_decoder(tmp_path: Path) -> None:
    model = str(embedded_model())
    paddle = line(
        f"python export_model.py --dtype float16 --model_name_or_path {model} --inference_model --export_precache true"
        " --quant_type weight_only_int8 --output_path ./inference --prefix_path tuned"
    )
    assert paddle.settings == {
        "command": "export decoder",
        "model": {"model": model},
        "output": {"decoder_precision": "int8", "out": "./inference"},
    }
    assert paddle.refused == ()

    (tmp_path / "a.yaml").write_text(
        f"run_mode: train\nload_checkpoint: {model}\nmodel: {{model_config: {{compute_dtype: bfloat16, do_sample: True,"
        " top_k: 3, is_sample_acceleration: False}}\n"
        "infer: {prefill_model_path: x/a.mindir}\n"
    )
    mindformers = line(f"python mindformers/tools/export.py --config_path {tmp_path}/a.yaml")
    assert mindformers.settings == {
        "command": "export decoder",
        "model": {"model": model},
        "output": {"graph_format": "mindir", "out": "x", "without_sampling": True},
    }
    assert "exported graphs have no bfloat16" in mindformers.format_report()


def test_a_folder_with_a_yaml_and_a_checkpoint_is_exported(tmp_path: Path) -> None:
    for name in ("test.yaml", "test.ckpt", "tokenizer.model"):
        (tmp_path / name).touch()
    found = line(f"python mindformers/tools/export.py --model_dir {tmp_path}")

    assert found.settings["model"] == {"llama_dir": str(tmp_path)}
    assert found.settings["output"] == {"graph_format": "mindir", "out": "output/mindir_full_checkpoint"}
    with pytest.raises(UsageError, match="has 0 YAML files"):
        line(f"python export.py --model_dir {tmp_path}/none")


@pytest.mark.parametrize("graph_format", ["onnx", "mindir"])
def test_an_exported_folder_is_run_and_determines_its_numbers(graph_format: str, tmp_path: Path) -> None:
    (tmp_path / "inference").mkdir()
    own: dict[str, Any] = dict.fromkeys(("name", "digest", "prompt", "channel_order"), "x")
    own |= {"format": graph_format, "dtype": "float32", "precision": "float", "has_sampling": True}
    ExportCard(**own, decoder=CONFIG.to_dict(), fingerprint={}, files={}).write(tmp_path / "inference")
    backend = {"decoder_backend": "mslite"} if graph_format == "mindir" else {}
    paddle = line(f"python predictor.py --mode static --dtype float16 --model_name_or_path {tmp_path}/inference")
    assert paddle.settings["computation"] == {"decoder": f"{tmp_path}/inference", **backend}
    assert paddle.settings["prompt"] == {"prompt": "hello world, how are you?", "raw": True}

    graphs = "--prefill_model_path {0}/a_prefill.mindir --increment_model_path {0}/a_inc.mindir --config_path {0}/c.ini"
    given = graphs.format(tmp_path / "inference")
    lite = line(f"python run_infer_main.py --device_id 0 --model_name llama {given} --seq_length 60")
    engine = {"ge_config": f"{tmp_path}/inference/c.ini"} if backend else {}
    assert lite.settings["computation"] == {"decoder": f"{tmp_path}/inference", **backend, **engine}
    assert lite.settings["prompt"] == {"prompt_file": ["-"], "raw": True}
    assert lite.settings["generation"] == {"max_length": 60, "temperature": 0.0, "max_new_tokens": 60}

    guide = line(f"python run_infer_main.py --device_id 1 --model_name bloom {given} --is_sample_acceleration True")
    assert guide.refused == ()
    assert guide.settings["computation"]["device"] == "npu:1"
    assert "model_name ignored: the model's folder says so" in guide.format_report()
    assert guide.settings["generation"] == {"temperature": 0.0, "max_length": 1024, "max_new_tokens": 1024}

    rest = "--model_name llama2_7b --predict_data hi --do_sample True --top_k 3 --seq_length 512 --max_length 60"
    drawn = line(f"python run_infer_main.py {given} {rest}")
    assert (drawn.refused, drawn.settings["prompt"]) == ((), {"prompt": "hi", "raw": True})
    ours = {"max_length": 60, "temperature": 1.0, "top_k": 3, "top_p": 1.0, "max_new_tokens": 60}
    assert drawn.settings["generation"] == ours

    path = tmp_path / "inference" / "a.yaml"
    path.write_text(
        "load_checkpoint: ''\nmodel: {model_config: {checkpoint_name_or_path: llama2_7b, compute_dtype: float16}}\n"
        "infer: {prefill_model_path: a_prefill.mindir, infer_seq_length: 512}\n"
    )
    yaml = import_file(str(path))  # its paths are relative to the file
    assert (yaml.settings["computation"], yaml.settings.get("model")) == (paddle.settings["computation"], None)


def test_a_key_that_a_file_lacks_is_refused_with_the_command_that_reports() -> None:
    for is_file, hint in ((True, "`llama-adapter config import x.sh` says"), (False, "leave it out")):
        with pytest.raises(UsageError) as caught:
            line("python predictor.py --dtype float16").check("x.sh", is_file=is_file)
        assert hint in caught.value.hint


def test_a_script_that_is_here_and_an_unknown_one_are_not_translated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["python", "predictor.py", "--model_name_or_path", "x"]
    assert import_line(words) is not None
    (tmp_path / "predictor.py").touch()
    assert import_line(words) is None
    (tmp_path / "predict.sh").write_text("export A=1\npython llm/predictor.py --model_name_or_path x\n")
    for shell in ("", "bash", "/bin/bash -ex", "bash -euo pipefail", "bash -E", "bash --login"):
        assert line(f"{shell} predict.sh").settings["model"] == {"model": "x"}
    with pytest.raises(UsageError, match=r"^`predict\.sh`: arguments after a \.sh file are not passed on"):
        import_line([".", "predict.sh", "x"])
    with pytest.raises(UsageError, match="No such file") as caught:
        import_line(["bash", "no.sh"])
    assert caught.value.hint.startswith("name a Python file, or a line of run_mindformer.py")
    assert import_line(["bash", "-c", "no.sh"]) is None
    for text, told in (
        ("python predictor.py --model_name_or_path x", "`predict.sh` runs `predictor.py`, which is a file here"),
        ("python mine.py --model_name_or_path x", "`predict.sh` runs no script of another system"),
        ("python infer.py --model_path x --world_size 2", "`predict.sh` runs no script of another system"),
    ):
        (tmp_path / "predict.sh").write_text(text)
        for given in [[]] if "is a file" in told else ([], ["x"]):
            with pytest.raises(UsageError, match=told):
                import_line(["bash", "predict.sh", *given])
    with pytest.raises(UsageError, match=r"`run_mindformers\.py` has no options"):
        import_line(["python", "run_mindformers.py"])
    assert import_line(["demo.py", "predict.sh"]) is None
    assert import_line(["demo.py", "a.py b", "--x", "1", "2"]) is None
    assert import_line(["demo.py", "what don't a.py\u00a0and b.py do?"]) is None
    for question in ("What's in my_export.py here?", "What's export.py about?", "Que fait export.py\u00a0?"):
        assert import_line(["python", "demo.py", question]) is None


def test_a_checkpoint_of_mindformers_is_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "to"
    folder.mkdir()
    options = f"--run_mode predict --load_checkpoint {folder}/a.ckpt"
    (refused,) = line(f"python run_mindformer.py {options}").refused
    assert f"There is no file `{folder}/a.ckpt`" in refused.text

    (folder / "a.ckpt").touch()
    assert line(f"python run_mindformer.py {options}").settings["model"] == {"llama_dir": str(folder)}
    with pytest.raises(UsageError, match=r"a\.ckpt` is no model of MindFormers by itself"):
        bundle_folder(f"{folder}/a.ckpt")
    with pytest.raises(CheckpointError, match="tokenizer"):
        Captioner.load(llama_dir=folder)
    (folder / "config.json").touch()  # of Hugging Face's form of the same model
    assert line(f"python run_mindformer.py {options}").settings["model"] == {"llama_dir": str(folder)}
