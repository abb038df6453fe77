"""The picture that a row of a table names or holds."""

import os
from collections.abc import Mapping

from llama_adapter.app.pictures.inputs.addresses import ADDRESS
from llama_adapter.app.pictures.inputs.fields import PICTURE_COLUMNS
from llama_adapter.app.pictures.inputs.items import PictureInput


def row_picture(values: Mapping[str, object], *, root: str, place: str) -> PictureInput | None:
    """The picture of a row, relative to the folder `root`; None if it has none. `place` is the row's, for messages.

    It is in the first of `PICTURE_COLUMNS` whose value is not null: a path or an address, or an object with `bytes` or
    `path`, as the `datasets` library stores pictures. Raises ValueError with the reason for another value.
    """
    column = next((name for name in PICTURE_COLUMNS if values.get(name) is not None), None)
    if column is None:
        return None
    value = values[column]
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        label = f"{place}/{value['path']}" if isinstance(value.get("path"), str) else place
        return PictureInput(source=value["bytes"], label=label, root=root or ".", found_in=(place,))
    name = value.get("path") if isinstance(value, Mapping) else value
    if not isinstance(name, str):
        raise ValueError(f"`{column}` is not the name of a file")
    if not name.strip():
        raise ValueError(f"its cell `{column}` is empty")
    path = name if ADDRESS.match(name) else os.path.join(root, name)
    return PictureInput(source=path, label=path, root=root or ".", found_in=(place,))
