"""The served page over real HTTP: it exposes no file, fetches nothing, limits what it takes, and has two endpoints."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.serving.online.service import ServiceLimits
from tests.app.serving.web.browser import ServedPage, serve_page

pytestmark = pytest.mark.slow

MAX_BYTES = 100_000
STAR = sample_pictures() / "12-red-star.jpg"
SECRETS = ("/etc/passwd", "/proc/self/environ", str(Path("README.md").resolve()), str(Path("pyproject.toml").resolve()))


@pytest.fixture(scope="module")
def served() -> Iterator[ServedPage]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llama_adapter.app.serving.web.page.MAX_UPLOAD_BYTES", 2 * MAX_BYTES)
        with serve_page(limits=ServiceLimits(max_picture_bytes=MAX_BYTES, max_prompt_chars=100)) as page:
            yield page


@pytest.fixture(scope="module")
def client(served: ServedPage) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, trust_env=False, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def config(client: httpx.Client) -> dict[str, Any]:
    answer: dict[str, Any] = client.get("/config").json()
    return answer


def upload(client: httpx.Client, data: bytes, *, name: str) -> str:
    answer = client.post("/gradio_api/upload", files={"files": (name, data)})
    path: str = answer.raise_for_status().json()[0]
    return path


def event_of(config: dict[str, Any], elem_id: str, event: str) -> dict[str, Any]:
    component = next(one["id"] for one in config["components"] if one["props"].get("elem_id") == elem_id)
    return next(one for one in config["dependencies"] if [component, event] in [list(t) for t in one["targets"]])


def choose(client: httpx.Client, config: dict[str, Any], value: Any, *, session: str = "forged") -> httpx.Response:
    """Tell the page that this picture was uploaded, as a browser does or as an attacker would."""
    event = event_of(config, "chat-picture", "upload")
    body = {"data": [None], "fn_index": event["id"], "session_hash": session, "event_data": {"files": [value]}}
    return client.post("/gradio_api/run/predict", json=body)


def file_data(path: str, **more: Any) -> dict[str, Any]:
    return {"path": path, "meta": {"_type": "gradio.FileData"}, **more}


def test_the_forged_events_below_would_work_for_an_uploaded_picture(
    client: httpx.Client, config: dict[str, Any]
) -> None:
    answer = choose(client, config, file_data(upload(client, STAR.read_bytes(), name="star.jpg")))

    assert answer.status_code == 200
    assert "224 × 224 pixels" in answer.text


@pytest.mark.parametrize("origin", ["http://localhost:9999", "http://127.0.0.1:9999", "https://a.example", "null"])
def test_no_page_of_another_origin_reads_or_sends_anything(client: httpx.Client, origin: str) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    for method, path in (
        *(("GET", "/"), ("GET", "/config"), ("GET", "/gradio_api/queue/data"), ("POST", "/gradio_api/queue/join")),
        *(("POST", "/gradio_api/upload"), ("OPTIONS", "/config"), ("OPTIONS", "/gradio_api/upload")),
    ):
        more = asked if method == "OPTIONS" else {}
        answer = client.request(method, path, headers={"origin": origin, **more})

        assert answer.status_code == (404 if method == "OPTIONS" else 403), path
        assert [name for name in answer.headers if name.startswith("access-control")] == [], path


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("form", ["{}", "{}%00.png", "/tmp/..{}", "%2e%2e/%2e%2e/%2e%2e{}"])
def test_no_file_of_the_machine_is_served(client: httpx.Client, secret: str, form: str) -> None:
    for route in ("/gradio_api/file=", "/file=", "/gradio_api/file/", "/static/", "/assets/", "/svelte/"):
        answer = client.get(route + form.format(secret))

        assert answer.status_code in (403, 404, 500), route
        assert "root:" not in answer.text
        assert "[project]" not in answer.text
        assert "LLaMA-Adapter\n" not in answer.text


@pytest.mark.parametrize("secret", SECRETS)
def test_a_forged_event_cannot_name_a_file_of_the_machine(
    client: httpx.Client, config: dict[str, Any], secret: str
) -> None:
    uploads = Path(os.environ["GRADIO_TEMP_DIR"])
    before = sorted(uploads.rglob("*"))
    forgeries: list[Any] = [
        file_data(secret),
        {"path": secret},  # without the file marker, so that Gradio does not check it
        file_data(secret, url="http://127.0.0.1/x.png", orig_name="x.png"),
        {"nested": [file_data(secret)]},
        file_data(str(uploads / ".." / ".." / ".." / secret.lstrip("/"))),
    ]
    for forgery in forgeries:
        answer = choose(client, config, forgery)

        assert answer.status_code == 500
        assert "root:" not in answer.text
    assert sorted(uploads.rglob("*")) == before, "a copy was made where files are served from"


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/a.png", "https://example.com/a.png", "file:///etc/passwd"])
def test_the_server_fetches_no_address(client: httpx.Client, config: dict[str, Any], address: str) -> None:
    assert choose(client, config, file_data(address)).status_code == 500
    assert choose(client, config, {"path": None, "url": address}).status_code == 200, "counts as no picture"
    assert client.get(f"/gradio_api/file={address}").status_code == 404
    assert client.get(f"/gradio_api/proxy={address}").status_code == 404


def tell(client: httpx.Client, event: dict[str, Any], data: list[Any], *, session: str, index: Any = 0) -> bool:
    """Send an event with these values; returns whether the page's handler succeeded."""
    body = {"data": data, "fn_index": event["id"], "session_hash": session, "event_data": {"index": index}}
    if event["queue"] is False:
        return client.post("/gradio_api/run/predict", json=body).status_code == 200
    if client.post("/gradio_api/queue/join", json=body).status_code != 200:
        return False
    with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": session}) as stream:
        told = [json.loads(line[6:]) for line in stream.iter_lines() if "process_completed" in line]
    return bool(told[0]["success"])


def test_every_event_refuses_foreign_files(client: httpx.Client, config: dict[str, Any]) -> None:
    events = [one for one in config["dependencies"] if one["backend_fn"] and one["inputs"]]

    assert len(events) >= 8
    for event in events:
        data = [file_data("/etc/passwd") for _ in event["inputs"]]
        assert not tell(client, event, data, session="every"), event["targets"]


def test_forged_events_leave_no_traceback_and_nothing_of_what_was_sent(
    client: httpx.Client, config: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    sent = "forged \x1b[31m\n words " * 500
    values = (sent, {"path": sent}, [{"nested": sent}], None)
    events = [event for event in config["dependencies"] if event["backend_fn"]]
    forged: list[tuple[Any, list[Any], Any]] = [(event, [], sent) for event in events]
    forged += [(event, [value] * len(event["inputs"]), value) for event in events for value in values]
    with ThreadPoolExecutor(8) as pool:
        outcomes = pool.map(
            lambda number: tell(client, *forged[number][:2], session=f"noisy {number}", index=forged[number][2]),
            range(len(forged)),
        )
        failed = list(outcomes).count(False)
    logged = "".join(capfd.readouterr())

    assert failed > 40
    assert "Traceback" not in logged
    assert "forged" not in logged
    assert "\x1b" not in logged
    assert len(logged) < 100_000


def test_queued_events_cannot_skip_the_queue(client: httpx.Client, config: dict[str, Any]) -> None:
    event = event_of(config, "chat-ask", "click")
    body = {"data": [], "fn_index": event["id"], "session_hash": "skips"}

    assert client.post("/gradio_api/run/predict", json=body).status_code == 404


def test_a_file_above_the_cap_is_not_taken(client: httpx.Client) -> None:
    answer = client.post("/gradio_api/upload", files={"files": ("large.png", b"0" * (2 * MAX_BYTES + 1))})

    assert answer.status_code == 413


def test_an_uploaded_page_is_not_shown_as_one(client: httpx.Client) -> None:
    for name in ("page.html", "drawing.svg", "script.js"):
        path = upload(client, b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", name=name)
        answer = client.get(f"/gradio_api/file={path}")

        assert answer.status_code == 200
        assert answer.headers["content-disposition"].startswith("attachment")
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_names_no_other_server(client: httpx.Client) -> None:
    page = client.get("/").text
    loaded = [line for line in page.splitlines() if "https://" in line and ("<script" in line or "<link" in line)]

    assert [line for line in loaded if "window.gradio_config" not in line] == []
    assert "fonts.googleapis.com" not in client.get("/theme.css").text


# Named endpoints


@pytest.fixture(scope="module")
def endpoints(served: ServedPage) -> Client:
    return Client(served.url, verbose=False)


def test_the_named_endpoints_are_the_only_ones(endpoints: Client) -> None:
    told: Any = endpoints.view_api(print_info=False, return_format="dict")

    assert told["unnamed_endpoints"] == {}
    assert {
        name: [one["parameter_name"] for one in endpoint["parameters"]]
        for name, endpoint in told["named_endpoints"].items()
    } == {"/ask": ["picture", "question"], "/caption": ["picture"]}
    shown = [one["api_name"] for one in endpoints.config["dependencies"] if one["api_visibility"] != "private"]
    assert sorted(shown) == ["ask", "caption"]


def test_a_picture_is_described_and_asked_about(endpoints: Client) -> None:
    caption = endpoints.predict(handle_file(STAR), api_name="/caption")

    assert "red star" in caption
    assert endpoints.predict(picture=handle_file(STAR), question=" ", api_name="/ask") == caption
    assert endpoints.predict(handle_file(STAR), "What color is the star?", api_name="/ask") == "red"


@pytest.mark.parametrize(
    ("picture", "question", "told"),
    [
        ("/etc/passwd", "What?", "Wanted a picture as `handle_file"),
        ({"path": "/etc/passwd"}, "What?", "Only files uploaded on this page"),
        ({"path": "https://example.com/a.png"}, "What?", "Only files uploaded on this page"),
        (handle_file(STAR), 5, "Wanted a picture as `handle_file"),
        (handle_file(STAR), "x" * 101, "100 is the limit"),
    ],
)
def test_other_values_are_refused_in_a_sentence(endpoints: Client, picture: Any, question: Any, told: str) -> None:
    with pytest.raises(AppError, match=told):
        endpoints.predict(picture, question, api_name="/ask")


def test_files_are_refused_as_on_the_page(endpoints: Client, tmp_path: Path) -> None:
    for data, told in ((b"text", "looks like plain text"), (b"x" * (MAX_BYTES + 1), "Wanted at most 100,000 bytes")):
        (tmp_path / "file.png").write_bytes(data)
        with pytest.raises(AppError, match=told):
            endpoints.predict(handle_file(tmp_path / "file.png"), api_name="/caption")
