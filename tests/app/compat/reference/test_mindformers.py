"""Programs of MindFormers and MindSpore Lite as their guides write them, with our `mindformers`."""

import re
import shutil
from pathlib import Path

import pytest

from llama_adapter import pipeline
from llama_adapter.app.models.resources import embedded_model
from tests.app.compat.reference.conftest import Program
from tests.app.golden import GOLDEN
from tests.llm.test_mindspore_weights import write_folder

INPUTS = ["I love Beijing, because", "LLaMA is a", "Huawei is a company that"]
TINY = GOLDEN / "LLaMA" / "TINY"
# Both programs of the guide "Inference Based on the Pipeline API", with another length, and a path to fill in.
BEGIN = """\
from mindformers import build_context
from mindformers import AutoModel, AutoTokenizer, pipeline, TextStreamer

# Construct the input content.
inputs = ["I love Beijing, because", "LLaMA is a", "Huawei is a company that"]

# Initialize the environment.
build_context({'context': {'mode': 0}, 'parallel': {}, 'parallel_config': {}})

# Instantiate a tokenizer.
tokenizer = AutoTokenizer.from_pretrained('llama2_7b')

# Instantiate a model.
# Modify the path to the local weight path.
model = AutoModel.from_pretrained('llama2_7b', checkpoint_name_or_path="path/to/llama2_7b.ckpt", use_past=True)

"""
WHOLE = f"""{BEGIN}
# Start a non-stream inference task in the pipeline.
text_generation_pipeline = pipeline(task="text_generation", model=model, tokenizer=tokenizer)
outputs = text_generation_pipeline(inputs, max_length=512, do_sample=False, top_k=3, top_p=1)
for output in outputs:
    print(output)
"""
STREAMED = f"""{BEGIN}
# Start a stream inference task in the pipeline.
streamer = TextStreamer(tokenizer)
text_generation_pipeline = pipeline(task="text_generation", model=model, tokenizer=tokenizer, streamer=streamer)
_ = text_generation_pipeline(inputs, max_length=512, do_sample=False, top_k=3, top_p=1)
"""


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """The texts of LLaMA-TINY."""
    with pipeline("text_generation", TINY, device="cpu") as complete:
        return [output["text_generation_text"][0] for output in complete(INPUTS, max_length=512)]


@pytest.mark.filterwarnings("ignore:Steps run eager")
@pytest.mark.parametrize("source", [WHOLE, STREAMED], ids=["whole", "streamed"])
def test_the_programs_of_the_guide_run_as_written(
    source: str, texts: list[str], program: Program, tmp_path: Path
) -> None:
    (tmp_path / "path" / "to").mkdir(parents=True)
    write_folder(tmp_path / "path" / "to").joinpath("llama.ckpt").rename(tmp_path / "path" / "to" / "llama2_7b.ckpt")

    ran = program(source)

    lines = texts if source is STREAMED else [str({"text_generation_text": [text]}) for text in texts]
    assert (ran.code, ran.out) == (0, "".join(f"{line}\n" for line in lines)), ran.err
    assert "use_past ignored" in ran.err
    assert "note: the pipeline's model brings its own tokenizer. No model `llama2_7b`" in ran.err


@pytest.mark.filterwarnings("ignore:Steps run eager")
def test_names_are_those_of_models_in_the_home(
    texts: list[str], program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    write_folder(tmp_path / "home" / "llama2_7b")
    monkeypatch.setenv("LLAMA_ADAPTER_HOME", str(tmp_path / "home"))
    by_name = WHOLE.replace(' checkpoint_name_or_path="path/to/llama2_7b.ckpt",', "")

    ran = program(by_name)

    assert ran.out.splitlines() == [str({"text_generation_text": [text]}) for text in texts]
    assert "tokenizer" not in ran.err


def test_flags_replace_model_device_and_tokenizer(program: Program, texts: list[str]) -> None:
    source = WHOLE.replace("{'mode': 0}", "{'device_target': 'Ascend', 'device_id': 3}")

    ran = program(source, flags=("--device", "cpu", "--model", str(embedded_model())))

    assert (ran.code, len(ran.out.splitlines())) == (0, 3), ran.err
    assert ran.out.splitlines()[0] != str({"text_generation_text": [texts[0]]})


def test_a_context_chooses_mode_and_device_and_notes_the_rest(program: Program) -> None:
    ran = program(
        "import mindformers\n"
        "mindformers.build_context({'context': {'mode': 1, 'device_target': 'CPU', 'max_device_memory': '8GB'}})\n"
        "with mindformers.pipeline('caption', max_new_tokens=2) as describe:\n"
        "    print(describe.captioner.info.mode, describe.captioner.info.device)\n"
        "mindformers.build_context({'context': {'mode': 7}})\n",
        flags=(),
    )

    assert (ran.code, ran.out.split()[:2]) == (2, ["eager", "cpu"])
    assert "note: build_context: context.max_device_memory ignored" in ran.err
    assert "wanted 0 (graph) or 1 (eager), got 7" in ran.err


def test_modules_and_tokenizers(program: Program) -> None:
    ran = program(
        "from mindformers.pipeline import pipeline\n"
        "from mindformers.models import BloomTokenizer\n"
        "from mindformers.models.llama.llama_tokenizer import LlamaTokenizer\n"
        "from mindformers.infer.infer_config import InferConfig\n"
        "import mindformers, mindformers.infer.infer_task\n"
        "assert mindformers.pipeline is pipeline\n"
        "assert mindformers.infer.infer_task.InferTask.check_task_valid('text_generation')\n"
        f"tokenizer = LlamaTokenizer.from_pretrained({str(GOLDEN / 'LLaMA' / 'tokenizer.model')!r})\n"
        f"same = BloomTokenizer.from_pretrained({str(TINY)!r})\n"
        "ids = tokenizer.encode('a small star')\n"
        "print(same.decode(ids), ids == same.encode('a small star'), ids[0])\n"
        "config = InferConfig('BUNDLE', infer_seq_length=256)\n".replace("BUNDLE", str(embedded_model()))
        + f"own = BloomTokenizer.from_pretrained({str(embedded_model())!r})\n"
        "with mindformers.InferTask.get_infer_task('text_generation', config, tokenizer=own) as complete:\n"
        "    print(complete(('What is a star?', None), do_sample=True, temperature=1e-4)[0])\n"
    )

    assert (ran.code, ran.out.splitlines()[:1]) == (0, ["a small star True 1"]), ran.err
    assert "I only know the shapes" in ran.out


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        (WHOLE, 2, r"There is no file `path/to/llama2_7b\.ckpt`"),
        ("import mindformers\nmindformers.AutoModel.from_pretrained('llama2_7b')", 2, "No model `llama2_7b`"),
        ("import mindformers\nmindformers.AutoModel.from_pretrained('.')", 2, "`.` is no model"),
        ("import mindformers\nmindformers.AutoTokenizer.from_pretrained('.')", 1, "`.` is no LLaMA folder"),
        (
            f"import mindformers\nmindformers.AutoModel.from_pretrained({str(TINY)!r}, type='GPTConfig')",
            2,
            "`model.model_config.type` is refused",
        ),
        ("from mindformers import Trainer", 1, r"hint: provided here are AutoModel, .*; training needs the package"),
        ("import mindformers.trainer", 1, "hint: provided here are AutoModel"),
    ],
)
def test_errors_are_true_and_short(source: str, code: int, said: str, program: Program) -> None:
    ran = program(source)

    assert (ran.code, ran.out) == (code, "")
    assert re.search(said, ran.err)
    assert "--" not in ran.err  # a program has no flags
    assert "config import" not in ran.err


@pytest.mark.parametrize(("model", "setting"), [(embedded_model(), "model"), (TINY, "llama_dir")])
def test_a_checkpoint_stands_for_the_model_of_its_folder(
    model: Path, setting: str, tmp_path: Path, program: Program
) -> None:
    shutil.copytree(model, tmp_path / "llama2_7b")
    (tmp_path / "llama2_7b" / "llama2_7b.ckpt").touch()

    ran = program(
        "from mindformers import AutoModel\n"
        "print(AutoModel.from_pretrained('llama2_7b', checkpoint_name_or_path='llama2_7b/llama2_7b.ckpt')['model'])"
    )

    assert (ran.code, ran.out) == (0, f"{ {setting: 'llama2_7b'} }\n"), ran.err


def test_an_installed_mindformers_stays_and_a_folder_of_that_name_is_none(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "programs" / "mindformers").mkdir(parents=True)
    assert program("import mindformers\nprint(mindformers.pipeline.__name__)").out == "pipeline\n"
    (tmp_path / "site" / "mindformers").mkdir(parents=True)
    (tmp_path / "site" / "mindformers" / "__init__.py").write_text("pipeline = 'the real one'")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    source = "import sys, mindformers\nprint(mindformers.pipeline, 'mindformers.models' in sys.modules)\n"

    ran = program(source + "del sys.modules['mindformers']")

    assert (ran.code, ran.out) == (0, "the real one False\n"), ran.err
    assert "installed package `mindformers`" in ran.err
    assert program("print(7)").err == ""


def test_sampling_can_be_switched_on_for_a_call(program: Program) -> None:
    ran = program(
        "from mindformers import AutoModelForCausalLM, LlamaForCausalLM, pipeline\n"
        "assert AutoModelForCausalLM is LlamaForCausalLM\n"
        f"model = LlamaForCausalLM.from_pretrained({str(TINY)!r}, do_sample=False, seq_length=64)\n"
        "complete = pipeline('text_generation', model)\n"
        "texts = [str(complete('a', seed=seed, do_sample=True, max_new_tokens=6)) for seed in (1, 2, 3)]\n"
        "print(len(set(texts)), complete.captioner.info.context)\n"
    )

    assert ran.code == 0, ran.err
    number, context = ran.out.split()
    assert int(number) > 1
    assert context == "64"
