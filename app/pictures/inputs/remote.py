"""A picture at an address, which is downloaded when it is read."""

import time
from dataclasses import dataclass, replace

from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.inputs.urls import AllowedHost, FetchError, PictureUrl
from llama_adapter.app.pictures.reading.reader import PictureReading, Reader
from llama_adapter.vision.files import DEFAULT_MAX_BYTES

FETCH_TIMEOUT_S = 10.0  # from the first name lookup to the last byte


@dataclass(frozen=True, slots=True)
class RemotePicture:
    """An address that `allowed` has the host of."""

    url: PictureUrl
    allowed: tuple[AllowedHost, ...]

    def read(self, reader: Reader, *, name: str) -> PictureReading:
        """Download the picture and read it. Blocks. A failure is returned as `error`."""
        from llama_adapter.app.pictures.inputs.fetching import fetch_in_thread

        started = time.perf_counter()
        try:
            data = fetch_in_thread(
                self.url, allowed=self.allowed, max_bytes=DEFAULT_MAX_BYTES, timeout_s=FETCH_TIMEOUT_S
            )
            reading = reader.read(data, name=name)
        except FetchError as error:
            reading = PictureReading(error=AnswerError(code=error.code, message=error.message))
        return replace(reading, elapsed_ms=(time.perf_counter() - started) * 1e3)
