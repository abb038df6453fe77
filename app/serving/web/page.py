"""The page: its layout, head, four tabs and theme, and the settings that Gradio serves it with."""

import asyncio
import json
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
from gradio.events import api
from gradio.themes.utils import colors as hues
from starlette.applications import Starlette
from starlette.routing import Mount

from llama_adapter.app.jobs.report import versions
from llama_adapter.app.models.spec import ModelInfo
from llama_adapter.app.serving.online.request_handle import Ask
from llama_adapter.app.serving.online.service import Service
from llama_adapter.app.serving.online.types import UnavailableError
from llama_adapter.app.serving.web.batch import build_batch
from llama_adapter.app.serving.web.chat import build_chat
from llama_adapter.app.serving.web.guards import GuardedBlocks, add_page_guards
from llama_adapter.app.serving.web.html import render, told
from llama_adapter.app.serving.web.runs import Runs
from llama_adapter.app.serving.web.scores import SavedReport, build_scores
from llama_adapter.app.serving.web.throughput import build_throughput
from llama_adapter.app.serving.web.uploads import MAX_UPLOAD_BYTES, read_upload, upload_of
from llama_adapter.app.serving.web.widgets import DIRECT, OnOpening, html_view
from llama_adapter.llm.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from fastapi import FastAPI

MAX_SESSIONS = 256  # pages with state; the state of the oldest is deleted
MAX_STREAMING = 256  # running events of all pages; the service has its own queue
MAX_QUEUED = 256  # waiting events of all pages
REFRESH_SECONDS = 5.0  # how often the shown state of the service is updated
_CLEANING_SECONDS = 600
_UPLOAD_SECONDS = 6 * 3600  # how long an uploaded picture is kept
_SYSTEM = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


def build_page(service: Service, *, samples: Sequence[Path], reports: tuple[SavedReport, ...] = ()) -> gr.Blocks:
    """The page of a started service. `samples` are picture files to try; `reports` are shown next to the throughput.

    For a LLaMA without adapter there are no tabs for pictures, and the reports have a separate tab.

    Mount it with `mount_page`, inside `uploads.private_uploads` and `guards.bounded_uploads`.
    """
    runs, info = Runs(), _info(service)
    sees_pictures = info is None or info.sees_pictures
    page = GuardedBlocks(
        title="LLaMA-Adapter", analytics_enabled=False, delete_cache=(_CLEANING_SECONDS, _UPLOAD_SECONDS)
    )
    with page:
        opening = [_refreshed(lambda: head(service), elem_id="page-head")]
        with gr.Tabs(elem_id="page-tabs"):
            with gr.Tab("Chat", id="chat"):
                sees_earlier = info is not None and info.sees_earlier
                build_chat(
                    service,
                    page=page,
                    samples=samples,
                    runs=runs,
                    sees_pictures=sees_pictures,
                    sees_earlier=sees_earlier,
                )
            if sees_pictures:
                with gr.Tab("Batch", id="batch"):
                    opening += build_batch(service, samples=samples, runs=runs)
                with gr.Tab("Throughput", id="throughput") as tab:
                    _build_measurements(runs=runs, reports=reports, tab=tab)
            elif reports:  # a report may be of any model, also of one for texts only
                _build_reports(reports)
            with gr.Tab("About", id="about"):
                state = _refreshed(lambda: render("about", "state", status=service.status()), elem_id="about-state")
                opening += [state, (html_view("", elem_id="about-model"), lambda: about(service))]

        def leave(request: gr.Request) -> None:
            runs.leave(str(request.session_hash))

        page.load(lambda: [make() for _, make in opening], None, [component for component, _ in opening], **DIRECT)
        page.unload(leave)
    for event in page.fns.values():  # including those that components create themselves
        event.api_visibility, event.api_name = "private", None
        if any(name == "load" for _, name in event.targets):
            event.queue = False
    if sees_pictures:
        with page:
            add_endpoints(service)
    return limited(page)


def limited(page: gr.Blocks) -> gr.Blocks:
    """The page itself, with limits on its sessions and events."""
    page.state_session_capacity = MAX_SESSIONS
    page.max_threads = MAX_STREAMING
    page.queue(max_size=MAX_QUEUED, api_open=False)
    return page


def add_endpoints(service: Service) -> None:
    """Add `/ask` and `/caption` to the present page, for Gradio's clients, such as `gradio_client`."""

    async def ask(picture: dict[str, Any], question: str, request: gr.Request) -> str:
        """The answer to a question about a picture, `handle_file(path)`."""
        try:
            if (file := upload_of(picture)) is None or not isinstance(question, str):
                raise ValueError("Wanted a picture as `handle_file(path)`, and a question as text")
            most = service.limits.max_picture_bytes
            data = await asyncio.to_thread(read_upload, file.path, name=file.base_name, max_bytes=most)
            prompt = question.strip() or service.info.default_prompt
            asked = Ask(picture=data, prompt=prompt, sampling=SamplingParams(), client=f"page {request.session_hash}")
            answer = await service.submit(asked).answer()
            if answer.error is not None:
                raise ValueError(answer.error.message)
        except Exception as error:
            raise gr.Error(told(error)[0], print_exception=False) from None
        return answer.text

    async def caption(picture: dict[str, Any], request: gr.Request) -> str:
        """A description of a picture, `handle_file(path)`."""
        return await ask(picture, "", request)

    for endpoint in (ask, caption):
        api(endpoint, concurrency_limit=service.limits.max_waiting)


def _build_measurements(*, runs: Runs, reports: tuple[SavedReport, ...], tab: gr.Tab) -> None:
    """The throughput of the model; if there are reports, also their scores, in a separate tab."""
    if not reports:
        build_throughput(runs=runs, tab=tab)
        return
    with gr.Tabs(elem_id="throughput-tabs"):
        with gr.Tab("Speed", id="speed"):
            build_throughput(runs=runs, tab=tab)
        _build_reports(reports)


def _build_reports(reports: tuple[SavedReport, ...]) -> None:
    with gr.Tab("Scores", id="scores"):
        build_scores(reports)


def mount_page(application: "FastAPI", page: gr.Blocks, service: Service) -> None:
    """Serve the page at the root of the application."""
    gr.mount_gradio_app(application, page, "/", **page_settings(service))
    mounted = next(route for route in reversed(application.routes) if isinstance(route, Mount))
    assert isinstance(mounted.app, Starlette), "Gradio mounts its application last"
    add_page_guards(mounted.app)


def page_settings(service: Service) -> dict[str, Any]:
    """The arguments with which Gradio serves the page."""
    return {
        "theme": build_theme(),
        "css_paths": (Path(__file__).with_name("style.css"),),
        "js": Path(__file__).with_name("focus.js").read_text(encoding="utf-8"),
        "footer_links": [],
        "run_history": False,
        "show_error": False,
        "max_file_size": max(MAX_UPLOAD_BYTES, service.limits.max_picture_bytes),
        "ssr_mode": False,
        "enable_monitoring": False,
        "pwa": False,
        "mcp_server": False,
    }


def _refreshed(make: Callable[[], str], *, elem_id: str) -> OnOpening:
    """HTML that is updated every `REFRESH_SECONDS`."""
    component = html_view(make(), elem_id=elem_id)
    gr.Timer(REFRESH_SECONDS).tick(make, None, component, **DIRECT)
    return component, make


def _info(service: Service) -> ModelInfo | None:
    """The description of the model; None while none is loaded."""
    try:
        return service.info
    except UnavailableError:
        return None


def head(service: Service) -> str:
    """The name of the page, and the model and its state in a few words."""
    status, info = service.status(), _info(service)
    words = "no model" if info is None else f"{info.name} on {info.device}"
    if status.state in ("loading", "restarting"):
        kind = ""
    else:
        kind = "is-ready" if status.state == "ready" and not status.is_stalled else "is-down"
    words = words if status.state == "ready" else f"{words}: {status.state}"
    return render("about", "head", words=words, kind=kind, sees_pictures=info is None or info.sees_pictures)


def about(service: Service) -> str:
    """What the model can do, its properties, the limits and the versions."""
    try:
        info, is_embedded = service.info, service.spec.is_embedded
    except UnavailableError as error:
        return render("about", "unavailable", message=error.message)
    packages = {**versions(), "gradio": metadata.version("gradio")}
    return render(
        "about", "about", info=info, limits=service.limits, packages=packages.items(), is_embedded=is_embedded
    )


def build_theme() -> gr.themes.Base:
    """Teal on slate, light and dark; nothing is loaded from the network."""
    theme = gr.themes.Base(
        primary_hue=hues.teal,
        secondary_hue=hues.teal,
        neutral_hue=hues.slate,
        radius_size=gr.themes.sizes.radius_lg,
        font=_SYSTEM,
        font_mono=_MONO,
    )
    # Gradio's name -> colours in the light and the dark theme
    colours = json.loads(Path(__file__).with_name("colours.json").read_text(encoding="utf-8"))
    dark = {f"{name}_dark": colour for name, (_, colour) in colours.items()}
    return theme.set(
        block_border_width="1px",
        block_shadow="none",
        block_title_text_weight="600",
        input_border_width="1px",
        button_border_width="1px",
        color_accent="*primary_600",
        **{name: colour for name, (colour, _) in colours.items()},
        **dark,
    )
