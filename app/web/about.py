"""The About tab and the head of the page: the model, the state of the service, its limits."""

from collections.abc import Callable
from importlib import metadata

import gradio as gr

from llama_adapter.app.measuring.report import versions
from llama_adapter.app.online.service import Service, UnavailableError
from llama_adapter.app.web.html import render
from llama_adapter.app.web.widgets import DIRECT, OnOpening, html_view

REFRESH_SECONDS = 5.0


def build_head(service: Service) -> list[OnOpening]:
    """Lay out the head of the page, with the state of the service."""
    return [_refreshed(lambda: head(service), elem_id="page-head")]


def build_about(service: Service) -> list[OnOpening]:
    """Lay out the tab; called inside a `gr.Tab`."""
    state = _refreshed(lambda: render("about", "state", status=service.status()), elem_id="about-state")
    return [state, (html_view("", elem_id="about-model"), lambda: about(service))]


def _refreshed(make: Callable[[], str], *, elem_id: str) -> OnOpening:
    component = html_view(make(), elem_id=elem_id)
    gr.Timer(REFRESH_SECONDS).tick(make, None, component, **DIRECT)
    return component, make


def head(service: Service) -> str:
    """The name of the page, and the model and its state in a few words."""
    status = service.status()
    try:
        words = f"{service.info.name} on {service.info.device}"
    except UnavailableError:
        words = "no model"
    if status.state in ("loading", "restarting"):
        kind = ""
    else:
        kind = "is-ready" if status.state == "ready" and not status.is_stalled else "is-down"
    words = words if status.state == "ready" else f"{words}: {status.state}"
    return render("about", "head", words=words, kind=kind)


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
