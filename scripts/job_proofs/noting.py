"""The command line, noting every picture that is begun: `python -m scripts.job_proofs.noting LOG caption ...`."""

import os
import sys

from app.cli import main
from app.conversation import Conversation
from app.encoded_pictures import EncodedPicture
from app.flow import Flow


def note_submissions(log: str) -> None:
    """From now on every conversation that is handed to an engine is a line of a file, at once."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    submit = Flow.submit

    def noted(self: Flow, conversation: Conversation, picture: EncodedPicture) -> int:
        os.write(descriptor, conversation.picture.encode() + b"\n")
        return submit(self, conversation, picture)

    Flow.submit = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    note_submissions(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
