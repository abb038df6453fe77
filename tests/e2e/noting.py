"""The command line with a log of every submitted picture: `python -m tests.e2e.noting LOG caption ...`."""

import os
import sys

from llama_adapter.app.captioning.active_request import ActiveRequest
from llama_adapter.app.captioning.caption_loop import CaptionLoop
from llama_adapter.app.captioning.encoded_pictures import EncodedPicture
from llama_adapter.app.command_line.main import main


def note_submissions(log: str) -> None:
    """Append the picture of every request to a file before the engine receives the request."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    submit = CaptionLoop.submit

    def noted(self: CaptionLoop, request: ActiveRequest, picture: EncodedPicture) -> int:
        os.write(descriptor, request.picture.encode() + b"\n")
        return submit(self, request, picture)

    CaptionLoop.submit = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    note_submissions(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
