"""How Gradio reads what is uploaded, with bounds for what it leaves unbounded."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradio import route_utils
from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException

LEFT_FREE_BYTES = 2**30  # of the disk, whatever is uploaded


class FilesOnly(route_utils.GradioMultiPartParser):
    """As Gradio's, which bounds only the size of each file: here nothing else grows either."""

    def on_headers_finished(self) -> None:
        """A part begins. Gradio keeps one that is no file in memory, however large."""
        super().on_headers_finished()
        if self._current_part.file is None:
            raise MultiPartException("An upload has only files.")
        if shutil.disk_usage(self._current_part.file.file.name).free < LEFT_FREE_BYTES:
            raise MultiPartException("The server's disk has no room for more files.")

    async def parse(self) -> FormData:
        """The files; when the client goes away meanwhile, nothing stays of them."""
        try:
            return await super().parse()
        except BaseException:
            for file in self._files_to_close_on_error:
                file.close()
                Path(file.name).unlink(missing_ok=True)
            raise


@contextmanager
def files_only() -> Iterator[None]:
    """Have Gradio read uploads so; it has no other place to say it."""
    before = route_utils.GradioMultiPartParser
    route_utils.GradioMultiPartParser = FilesOnly  # type: ignore[misc]
    try:
        yield
    finally:
        route_utils.GradioMultiPartParser = before  # type: ignore[misc]
