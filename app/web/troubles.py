"""Errors as the page tells them: what users can mend in full, of anything else only that it happened. No Gradio."""

import logging

from llama_adapter.app.online.service import ServiceError
from llama_adapter.runtime.problems import describe

_log = logging.getLogger("llama_adapter")


def told(error: Exception) -> tuple[str, str]:
    """A sentence and a hint, which may be empty. A fault of the server's own goes to its log, by its kind alone.

    Its message might hold paths of the server, or what somebody asked.
    """
    if isinstance(error, ServiceError):
        return f"{error.message}.", error.hint
    problem = describe(error)
    if problem.http_status < 500:
        return f"{problem.sentence.removesuffix('.')}.", problem.hint
    _log.error("page: something was not answered: %s", type(error).__name__)
    return "Something went wrong on the server.", "try again; its log says what kind of fault it was"
