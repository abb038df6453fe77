"""Loads a captioner for a service."""

from collections.abc import Callable

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.spec import PLAIN_MODES, CaptionerSpec


def load_warm(spec: CaptionerSpec, *, tell: Callable[[str], None]) -> Captioner:
    """Load a captioner, pass its notes to `tell`, and compile the programs of a graph mode."""
    captioner = Captioner.from_spec(spec)
    for note in captioner.info.notes:
        tell(f"note: {note}")
    if captioner.info.mode not in PLAIN_MODES:
        warm_up = captioner.warm_up()
        tell(f"warm-up: {warm_up.programs} programs ready in {warm_up.seconds:.1f} s")
    return captioner
