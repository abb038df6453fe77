"""How tests are collected, distributed over processes, and how property-based tests run.

Property-based tests use the same examples each time and have no deadline, because a machine may be busy. For other and
more examples: `pytest --hypothesis-profile explore`.
"""

import gc
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")

# A script that starts tests in the background makes them ignore these signals, and every child process would inherit
# this.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Processes with another HOME use the kernels that are already compiled.
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))

# Without kept bytecode, each process that tests start would compile all of our modules, and each of pytest all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Clusters that programs start would have a process for each core that waits for a task.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

# Without a GPU, Triton's kernels run in its interpreter. It must be chosen before they are imported.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"

gc.disable()  # imports leave little garbage, and looking for it would take a third of pytest's collection
# The default threshold of Python 3.11 is 700 new objects; with it, garbage collection takes 5 % of the quick tests'
# processor time.
gc.set_threshold(50_000)


# The allowed reasons to skip a test: properties of this machine, and programs that take too long to build. Other skips
# are failures, because whatever can be installed must be installed.
ALLOWED_SKIPS = re.compile(
    r"this processor has no |they are for Linux on x86_64|this machine's oneDNN does not compute in "
    r"|no CUDA device here|no fastapi beside this GPU"
    r"|torch_npu (has no wheel for|\S+ does not go with|refuses a torch)|the torch_npu in .* is for another Python"
    r"|onnxruntime-cann (has no wheel for|needs numpy 1)"
    r"|torch_npu is installed here|llama-cpp-python is compiled for minutes"
    r"|root may open every file|only root may |this file system takes no such names"
    r"|needs (named pipes|Linux|a file)|only glibc |Linux has it"
)


def fail_unless_allowed(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure unless its reason is one of `ALLOWED_SKIPS`."""
    if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not ALLOWED_SKIPS.match(reason):
            report.outcome = "failed"
            report.longrepr = f"skipped for a reason that tests/conftest.py does not allow: {reason}"


@pytest.fixture(scope="session", autouse=True)
def no_model_is_known() -> Iterator[None]:
    """In this process, no model is known from earlier loads, and all are opened by torch.

    Tests look into models and change devices. Commands that tests start know models, and open bundles without torch.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("llama_adapter.app.captioning.assemble_arrays.assemble_arrays", lambda spec: None)
        patched.setattr("llama_adapter.app.models.known._place", _unknown)
        yield


def _unknown(spec: object) -> Path:
    raise FileNotFoundError("no model is known")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fail_unless_allowed(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_unless_allowed(report)
    return report


ROOT = Path(__file__).resolve().parents[1]
# The files that take the most time, by measurement (`--durations`). With three processes the order of files matters
# little, with more of them it does. Files that start Ray are kept apart from each other, because two clusters that
# start at the same time as mypy are slow.
LONGEST = (
    "tests/test_docs.py",
    "tests/e2e/test_browser_chat.py",
    "tests/app/learning/training/test_train.py",
    "tests/e2e/test_replicas.py",
    "tests/app/models/parallel/test_ranks.py",
    "tests/e2e/test_browser_batch.py",
    "tests/runtime/devices/test_triton.py",
    "tests/e2e/test_ray.py",
    "tests/app/models/parallel/test_groups.py",
    "tests/scripts/test_gpu_round.py",
    "tests/e2e/test_ascend_route.py",
    "tests/npu/test_chips.py",
    "tests/e2e/test_schema_fuzz.py",
    "tests/app/captioning/test_devices.py",
    "tests/app/captioning/test_gguf_model.py",
    "tests/app/jobs/clusters/test_cluster.py",
)
# Files that take long, by measurement: they compute with models in all runners and precisions, with kernels and
# exported graphs, or run programs. `--quick` leaves them out, before they are imported.
NOT_QUICK = (
    "tests/app/captioning/tasks/test_picture_prompts.py",
    "tests/app/captioning/test_assemble_arrays.py",
    "tests/app/captioning/test_chats.py",
    "tests/app/captioning/test_constrained.py",
    "tests/app/captioning/test_exported.py",
    "tests/app/captioning/test_exported_picture_tokens.py",
    "tests/app/captioning/test_foreign_models.py",
    "tests/app/captioning/test_modes.py",
    "tests/app/captioning/test_picture_tokens.py",
    "tests/app/captioning/test_pictures.py",
    "tests/app/captioning/test_queue.py",
    "tests/app/captioning/test_text_adapters.py",
    "tests/app/command_line/commands/test_get.py",
    "tests/app/command_line/commands/test_picture_models.py",
    "tests/app/command_line/doctor/test_model.py",
    "tests/app/command_line/test_start.py",
    "tests/app/compat/reference/test_llama.py",
    "tests/app/jobs/test_encoding.py",
    "tests/app/learning/calibration/test_promising.py",
    "tests/app/learning/evaluating/test_eval.py",
    "tests/app/learning/quantising/test_calibrated.py",
    "tests/app/learning/scores/test_intervals.py",
    "tests/app/learning/scores/test_report.py",
    "tests/app/learning/training/test_eye.py",
    "tests/app/learning/training/test_model.py",
    "tests/app/learning/training/test_plan.py",
    "tests/app/learning/training/test_results.py",
    "tests/app/models/graph_export/test_decoder.py",
    "tests/app/models/named/test_located.py",
    "tests/app/models/test_bundle.py",
    "tests/app/models/test_checkpoints.py",
    "tests/app/models/test_out_of_distribution.py",
    "tests/app/models/test_packed_bundle.py",
    "tests/app/models/test_plan.py",
    "tests/app/models/test_quantised_model.py",
    "tests/app/models/test_split_bundle.py",
    "tests/app/models/test_text_bundles.py",
    "tests/app/serving/online/test_service.py",
    "tests/e2e/test_demo.py",
    "tests/fuzz/test_targets.py",
    "tests/llm/test_async_readback.py",
    "tests/llm/test_cuda.py",
    "tests/llm/test_exported_decoder.py",
    "tests/llm/test_families.py",
    "tests/llm/test_gguf.py",
    "tests/llm/test_model.py",
    "tests/llm/test_native_ranks.py",
    "tests/llm/test_native_runner.py",
    "tests/llm/test_past.py",
    "tests/llm/test_picture_tokens.py",
    "tests/llm/test_rows.py",
    "tests/llm/test_sampler.py",
    "tests/llm/test_sources_of_families.py",
    "tests/llm/test_tokenizer_kinds.py",
    "tests/parity/test_captioner.py",
    "tests/parity/test_decoder.py",
    "tests/parity/test_vision.py",
    "tests/runtime/devices/test_triton.py",
    "tests/runtime/graphs/test_atc.py",
    "tests/runtime/graphs/test_om_dims.py",
    "tests/runtime/graphs/test_onnx_session.py",
    "tests/runtime/kernels/test_linear.py",
    "tests/runtime/kernels/test_matrices.py",
    "tests/runtime/tensor_files/test_torch_files.py",
    "tests/scripts/peers/test_programs.py",
    "tests/scripts/test_ascend_guide.py",
    "tests/scripts/test_common.py",
    "tests/scripts/test_gpu_round.py",
    "tests/scripts/train_embedded/test_bundle.py",
    "tests/scripts/train_embedded/test_stages.py",
    "tests/vision/test_export.py",
    "tests/vision/test_native_encoder.py",
    "tests/vision/test_preprocess.py",
    "tests/vision/test_torch_backend.py",
    "tests/vision/test_towers.py",
)
# Files that share a result that takes a process half a minute to compute, most of the time of `test_chips.py`.
TOGETHER = dict.fromkeys(("tests/npu/test_few_bits.py", "tests/npu/test_ranks.py"), "tests/npu/test_chips.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run the files, and the tests of each, in random order"
    )
    parser.addoption("--quick", action="store_true", help="leave out files that take long")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out `NOT_QUICK` with `--quick`."""
    return (config.getoption("quick") and collection_path in {ROOT / name for name in NOT_QUICK}) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort long files first, so that no process works alone at the end.

    The order is: `LONGEST`, then e2e, then other files with slow tests, then the rest. Within each kind, files with
    more tests come first. With `--shuffle`, the order of files and of the tests of each file is random.
    """
    if (seed := config.getoption("shuffle")) is not None:
        draw = random.Random(seed)
        draw.shuffle(items)
        places = {path: draw.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: places[item.path])
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    sizes = Counter(item.path for item in items)
    first = {ROOT / name: number for number, name in enumerate(LONGEST)}
    assert all((ROOT / name).exists() for name in (*LONGEST, *NOT_QUICK, *TOGETHER)), (
        "a file that is named here is no more"
    )

    def place(item: pytest.Item) -> tuple[int, bool, bool, int, Path]:
        rank = first.get(item.path, len(first))
        return rank, "e2e" not in item.path.parts, item.path not in slow, -sizes[item.path], item.path

    items.sort(key=place)


class FileScheduling(LoadFileScheduling):
    """Runs the tests of a file, and of files listed together, in one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return TOGETHER.get(file, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    """With `worksteal` it is xdist's own, for files whose tests share little and compile long."""
    return None if config.getoption("dist") == "worksteal" else FileScheduling(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.freeze()  # skips the interpreter's last collection


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process more than there are cores, because many tests wait for other processes; those of `--quick` do not."""
    return (os.cpu_count() or 1) + (not config.getoption("quick"))


@pytest.fixture(scope="module", autouse=True)
def _few_objects_to_scan() -> None:
    """Keep what earlier files have imported and made from being scanned again.

    The programs under test collect garbage when memory is short or weights are replaced, and a process of tests has
    millions of objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _run_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Names a folder that all processes of a test run share, for files that take long to make."""
    own = tmp_path_factory.getbasetemp()
    os.environ["TEST_RUN_FOLDER"] = str(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)
    # A program that torch compiled for other instruction sets or threads ends the process of a later run.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TEST_RUN_FOLDER"] + "/inductor"
