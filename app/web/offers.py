"""Questions to start from that fit the model of a service."""

from llama_adapter.app.online.service import Service, UnavailableError
from llama_adapter.app.web.templates import Templates, templates


def offered(service: Service) -> Templates:
    """Those of the embedded model where it answers; general ones otherwise, also while nothing is loaded."""
    try:
        return templates(is_embedded=service.spec.is_embedded)
    except UnavailableError:
        return templates(is_embedded=False)
