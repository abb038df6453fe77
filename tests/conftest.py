"""How tests are collected, spread over processes, and how properties are tried.

Properties are tried with the same examples each time, however long one takes on a busy machine. Other examples, and
more of them: `pytest --hypothesis-profile explore`.
"""

import gc
import os
import re
import signal
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")

# A script that starts tests in the background has them ignore these signals, and every process would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Processes with another HOME have the kernels that are compiled already.
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))

gc.disable()  # imports make few objects that can be freed, and looking for them takes a third of a collection's time
# Python's own threshold is 700 objects more: with it, looking takes 5 % of the quick tests' processor time.
gc.set_threshold(50_000)


# Reasons to skip a test: what this machine is, and what takes too long to build. Other skips are failures, because what
# can be installed must be there.
ALLOWED_SKIPS = re.compile(
    r"this processor has no |they are for Linux on x86_64|this machine's oneDNN does not compute in "
    r"|no CUDA device here"
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
# Files with most processor time, by measurement. Those that start Ray are apart from each other: two clusters that
# start at once, beside mypy, are slow.
LONGEST = (
    "tests/test_docs.py",
    "tests/npu/test_chips.py",
    "tests/e2e/test_ascend_route.py",
    "tests/e2e/test_openai_client.py",
    "tests/app/parallel/test_groups.py",
    "tests/e2e/test_jobs.py",
    "tests/test_kernel_wheel.py",
    "tests/e2e/test_replicas.py",
    "tests/e2e/test_browser_chat.py",
    "tests/app/doctor/test_environment.py",
    "tests/e2e/test_ray.py",
    "tests/app/models/test_load_peak.py",
)
# Files that share what takes a process minutes to compute.
TOGETHER = dict.fromkeys(("tests/npu/test_few_bits.py", "tests/npu/test_ranks.py"), "tests/npu/test_chips.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that no process works alone at the end.

    First those of `LONGEST`, then e2e, then others with slow tests, then the rest; of the same kind by their number of
    tests.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    sizes = Counter(item.path for item in items)
    first = {ROOT / name: number for number, name in enumerate(LONGEST)}
    assert all((ROOT / name).exists() for name in (*LONGEST, *TOGETHER)), "a file that is named here is no more"

    def place(item: pytest.Item) -> tuple[int, bool, bool, int, Path]:
        rank = first.get(item.path, len(first))
        return rank, "e2e" not in item.path.parts, item.path not in slow, -sizes[item.path], item.path

    items.sort(key=place)


class FileScheduling(LoadFileScheduling):
    """Tests of a file, and of files that go together, run in one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return TOGETHER.get(file, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    return FileScheduling(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.freeze()  # the interpreter's last collection


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for processes."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(scope="session", autouse=True)
def _run_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder that all processes of a test run share, for files that take long to make."""
    own = tmp_path_factory.getbasetemp()
    os.environ["TEST_RUN_FOLDER"] = str(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)
