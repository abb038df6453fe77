"""Questions about the sample pictures, as bodies of chat requests."""

import base64
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.common import sample_files

CAPTION = "Generate caption of this image"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A picture and a question, answered with the likeliest tokens."""

    name: str
    picture: bytes
    prompt: str

    def body(self, *, stream: bool) -> bytes:
        """The request's body."""
        return b"".join(self._parts(self.picture, stream=stream))

    def around(self) -> tuple[bytes, bytes]:
        """A streamed body, split at the end of the picture. Bytes inserted there are ignored by picture decoders."""
        # Base64 encodes groups of three bytes separately.
        padded = self.picture + bytes(-len(self.picture) % 3)
        before, encoded, after = self._parts(padded, stream=True)
        return before + encoded, after

    def _parts(self, picture: bytes, *, stream: bool) -> tuple[bytes, bytes, bytes]:
        picture_part = {"type": "image_url", "image_url": {"url": "@"}}
        request: dict[str, Any] = {
            "model": "default",
            "messages": [{"role": "user", "content": [picture_part, {"type": "text", "text": self.prompt}]}],
            "temperature": 0.0,
            "stream": stream,
        }
        if stream:
            request["stream_options"] = {"include_usage": True}
        before, _, after = json.dumps(request).partition("@")
        return f"{before}data:image/png;base64,".encode(), base64.b64encode(picture), after.encode()


def captions() -> list[Question]:
    """The caption question about each sample picture."""
    return [Question(name=file.name, picture=file.read_bytes(), prompt=CAPTION) for file in sample_files()]


class Workload:
    """Endless request bodies; with `is_new`, each has a picture that the server has not seen before.

    `expected` has the right answer to each question.
    """

    def __init__(self, questions: Sequence[Question], *, is_new: bool, expected: Sequence[str] = ()) -> None:
        self.expected, self.num_questions = expected, len(questions)
        self._bodies = [question.around() for question in questions]
        self._is_new = is_new
        self._numbers = itertools.count(1)

    def __next__(self) -> tuple[int, bytes]:
        """The index of the next question, and its body."""
        number = next(self._numbers)
        index = number % len(self._bodies)
        before, after = self._bodies[index]
        # A different number changes the digest of the picture.
        return index, before + base64.b64encode((number if self._is_new else 0).to_bytes(12, "big")) + after
