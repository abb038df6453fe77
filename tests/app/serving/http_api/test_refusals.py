"""Requests that a running server must refuse: each gets its status and code, and the next request is answered."""

import asyncio
import re
from collections.abc import Iterator

import pytest

from scripts.service_bench.load import warm_up
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.questions import Workload, captions
from tests.app.serving.http_api.refused import all_cases, exchange, host_flags
from tests.app.serving.http_api.site import COMMAND, RedirectingSite

pytestmark = pytest.mark.slow

CASES = [pytest.param(number, id=case.name) for number, case in enumerate(all_cases(0))]


@pytest.fixture(scope="module")
def site() -> Iterator[RedirectingSite]:
    with RedirectingSite() as site:
        yield site


@pytest.fixture(scope="module")
def server(site: RedirectingSite) -> Iterator[ServerProcess]:
    with ServerProcess(*host_flags(site.port), command=COMMAND) as server:
        yield server


@pytest.mark.parametrize("number", CASES)
def test_a_bad_request_is_refused_as_it_should_be(site: RedirectingSite, server: ServerProcess, number: int) -> None:
    case = all_cases(site.port)[number]

    came = exchange(server.host, server.port, case.pieces())

    assert (came.status, came.code) == (case.status, case.code)
    assert came.message
    assert "Traceback" not in came.message


def test_good_requests_are_answered_after_all_of_them(server: ServerProcess) -> None:
    asyncio.run(warm_up(server, Workload(captions(), is_new=False), number=8))  # raises an error if one is not answered


def test_nothing_of_the_requests_is_in_the_log(server: ServerProcess) -> None:
    # Codes of errors, and paths where nothing is served, are in the log.
    said = re.sub(r", error \w+(, path \S+)?", "", "\n".join(server.lines))

    for private in ("passwd", "evil.test", "meta-data", "base64", "script", "word word"):
        assert private not in said
    assert "Traceback" not in said
