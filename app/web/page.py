"""The page: its frame and four tabs, and the settings that Gradio serves it with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from llama_adapter.app.http_api.bodies import BodyLimit
from llama_adapter.app.online.service import Service
from llama_adapter.app.web.about import build_about, build_head
from llama_adapter.app.web.batch import build_batch
from llama_adapter.app.web.chat import build_chat
from llama_adapter.app.web.guards import EVENT_PATHS, ClosedRoutes, GuardedBlocks
from llama_adapter.app.web.runs import Runs
from llama_adapter.app.web.theme import STYLES, build_theme
from llama_adapter.app.web.throughput import build_throughput
from llama_adapter.app.web.widgets import DIRECT

MAX_SESSIONS = 256  # pages with state; the oldest is forgotten
MAX_STREAMING = 256  # running events of all pages; the service has its own queue
MAX_QUEUED = 256  # waiting events of all pages
MAX_UPLOAD_BYTES = 256 * 2**20  # of one file, such as a zip; pictures have their own limit when read
MAX_EVENT_BYTES = 8 * 2**20  # of one event's values; the file names of a large folder take half of it
_CLEANING_SECONDS = 600
_UPLOAD_SECONDS = 6 * 3600  # how long an uploaded picture is kept
_EVENT_LIMIT = {
    "prefix": EVENT_PATHS,
    "max_bytes": MAX_EVENT_BYTES,
    "max_bytes_under_way": 8 * MAX_EVENT_BYTES,
    "timeout_s": 30.0,
}


def build_page(service: Service, *, samples: Sequence[Path]) -> gr.Blocks:
    """The page of a started service; `samples` are picture files to try.

    Mount it with `page_settings`, inside `uploads.private_uploads` and `guards.bounded_uploads`.
    """
    runs = Runs()
    page = GuardedBlocks(
        title="LLaMA-Adapter", analytics_enabled=False, delete_cache=(_CLEANING_SECONDS, _UPLOAD_SECONDS)
    )
    with page:
        opening = build_head(service)
        with gr.Tabs(elem_id="page-tabs"):
            with gr.Tab("Chat", id="chat"):
                opening += build_chat(service, samples=samples, runs=runs)
            with gr.Tab("Batch", id="batch"):
                opening += build_batch(service, samples=samples, runs=runs)
            with gr.Tab("Throughput", id="throughput"):
                build_throughput(service, runs=runs)
            with gr.Tab("About", id="about"):
                opening += build_about(service)

        def leave(request: gr.Request) -> None:
            runs.stop(str(request.session_hash))

        page.load(lambda: [make() for _, make in opening], None, [component for component, _ in opening], **DIRECT)
        page.unload(leave)
    for event in page.fns.values():  # including those that components create themselves
        event.api_visibility = "private"
        if any(name == "load" for _, name in event.targets):
            event.queue = False
    page.state_session_capacity = MAX_SESSIONS
    page.max_threads = MAX_STREAMING
    page.queue(max_size=MAX_QUEUED, api_open=False)
    return page


def page_settings(service: Service) -> dict[str, Any]:
    """Keyword arguments for `gr.mount_gradio_app(app, page, path, ...)`."""
    return {
        "theme": build_theme(),
        "css_paths": STYLES,
        "footer_links": [],
        "run_history": False,
        "show_error": False,
        "max_file_size": max(MAX_UPLOAD_BYTES, service.limits.max_picture_bytes),
        "ssr_mode": False,
        "enable_monitoring": False,
        "pwa": False,
        "mcp_server": False,
        # Starlette takes its middlewares as (class, arguments, keywords).
        "app_kwargs": {"middleware": [(ClosedRoutes, (), {}), (BodyLimit, (), _EVENT_LIMIT)]},
    }
