"""The About tab and the head of the page; about_view has the HTML."""

from collections.abc import Callable

import gradio as gr

from llama_adapter.app.online.service import Service
from llama_adapter.app.web.about_view import about, page_head, state_card
from llama_adapter.app.web.picture_input import AT_ONCE, OnOpening, plain

REFRESH_SECONDS = 5.0


def build_about(service: Service) -> list[OnOpening]:
    """Lay the tab out; called inside a `gr.Tab`."""
    state = plain("", elem_id="about-state")
    model = plain("", elem_id="about-model")
    _refresh(state, lambda: state_card(service.status()))
    return [(state, lambda: state_card(service.status())), (model, lambda: about(service))]


def build_head(service: Service) -> list[OnOpening]:
    """Lay out the head of the page, with the state of the service."""
    head = plain(page_head(service), elem_id="page-head")
    _refresh(head, lambda: page_head(service))
    return [(head, lambda: page_head(service))]


def _refresh(component: gr.HTML, make: Callable[[], str]) -> None:
    gr.Timer(REFRESH_SECONDS).tick(make, None, component, **AT_ONCE)
