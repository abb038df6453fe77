"""Small pictures inside HTML: JPEG files as `data:` addresses."""

import asyncio
import base64
from io import BytesIO
from typing import Final

from PIL import Image

from llama_adapter.app.online.service import Service

THUMBNAIL_SIDE: Final = 160  # pixels


def data_address(image: Image.Image) -> str:
    """`data:image/jpeg;base64,...` of an RGB image."""
    file = BytesIO()
    image.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode("ascii")


async def thumbnail(service: Service, picture: bytes, *, name: str, client: str) -> str | None:
    """The data address of a picture file with both sides at most `THUMBNAIL_SIDE`; None whatever goes wrong."""
    try:
        reading = service.view(picture, name=name, side=THUMBNAIL_SIDE, client=client)
        view = await asyncio.wait_for(asyncio.wrap_future(reading), service.limits.timeout_s)
    except Exception:  # an answer is worth more than its thumbnail
        return None
    return None if view.pixels is None else data_address(Image.fromarray(view.pixels))
