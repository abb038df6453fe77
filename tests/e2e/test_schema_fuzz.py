"""schemathesis and the API with the embedded model: valid and invalid requests are generated from the schema.

LLAMA_ADAPTER_FUZZ_EXAMPLES sets the number of requests per operation.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from llama_adapter import Captioner
from llama_adapter.app.serving.http_api.api import ApiSettings, create_api, open_batches
from llama_adapter.app.serving.http_api.file_store import FileLimits
from llama_adapter.app.serving.http_api.metrics import Metrics
from llama_adapter.app.serving.online.service import Service
from tests.app.golden import ROOT
from tests.app.serving.http_api.live import served
from tests.app.serving.online.waiting import started

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("LLAMA_ADAPTER_FUZZ_EXAMPLES", "10"))
HOOKS = Path(__file__).with_name("schema_fuzz_hooks.py")
REQUEST_TIMEOUT_S = 30  # a slower request is reported as a failure
# Most parameters are common to three operations. In two of them, each gets all values of the coverage phase, a thousand
# requests and more; in the third, more requests are generated in place of these.
CONFIGURATION = f"""
hooks = "{HOOKS}"
generation.max-examples = {EXAMPLES}

[[operations]]
include-name = "POST /v1/completions"
phases.coverage.enabled = false
generation.max-examples = {10 * EXAMPLES}
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    metrics = Metrics()
    folder, settings = str(tmp_path_factory.mktemp("files") / "kept"), ApiSettings()
    with (
        started(Service(Captioner.load, observer=metrics)) as service,
        open_batches(folder, service, settings=settings, limits=FileLimits()) as batches,
        served(create_api(service, settings=settings, metrics=metrics, batches=batches)) as url,
    ):
        yield url


def test_generated_requests_get_what_the_schema_promises_and_never_a_5xx(url: str, tmp_path: Path) -> None:
    configuration = tmp_path / "schemathesis.toml"
    configuration.write_text(CONFIGURATION)

    ran = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(configuration)),
            *("run", f"{url}/openapi.json", "--continue-on-failure", "--phases", "examples,coverage,fuzzing"),
            *("--request-timeout", str(REQUEST_TIMEOUT_S), "--no-color"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = re.search(r"(\d+) generated, (\d+) passed", ran.stdout)
    assert found is not None, ran.stdout
    assert int(found[1]) == int(found[2]) >= 300
    counts = requests_by_status(url)
    print({status: sum(counts[status]) for status in sorted(counts)})  # shown by `pytest -s`
    assert not [status for status in counts if status >= 500]
    assert sum(counts[200]) >= 20
    assert httpx.get(f"{url}/health", trust_env=False).json()["restarts"] == 0


def requests_by_status(url: str) -> dict[int, list[int]]:
    """The numbers of requests that the server answered with each status, one number per route and method."""
    found: dict[int, list[int]] = {}
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    for status, count in re.findall(r'^llama_adapter_http_requests_total{.*status="(\d+)"} (\d+)', text, re.MULTILINE):
        found.setdefault(int(status), []).append(int(count))
    return found
