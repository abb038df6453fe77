"""Why the picture of a request is not taken, before anything is decoded; what decoding finds is vision.errors."""

from typing import Literal

from llama_adapter.runtime.errors import LlamaAdapterError

# As OpenAI names them where it has a name.
PictureRefusal = Literal[
    "invalid_image_url",  # no URL of a kind that is read here
    "invalid_base64_image",
    "unsupported_image_media_type",
    "empty_image_file",
    "image_file_too_large",
    "image_host_not_allowed",  # of a remote picture: not on the list, or its address is not public
    "failed_to_download_image",
]


class PictureRefusedError(LlamaAdapterError):
    """The picture of a request is refused; `message` has no payload and no URL beyond a short form of it."""

    def __init__(self, message: str, *, code: PictureRefusal, status: int = 400) -> None:
        super().__init__(message)
        self.code: PictureRefusal = code
        self.http_status = status
