"""A request that can be answered, for the documentation and whoever tries it."""

# A red square, 16 pixels wide.
EXAMPLE_PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQAQMAAAAlPW0iAAAABlBMVEWWlpbcHh4C6O6xAAAAFElEQVR42mNgQAL8H5gYGDARMgAAI20BDofI/jkAAAAASUVORK5CYII="
)
_EXAMPLE_PARTS = [
    {"type": "image_url", "image_url": {"url": EXAMPLE_PICTURE}},
    {"type": "text", "text": "What color is the square?"},
]
EXAMPLE = {"model": "default", "messages": [{"role": "user", "content": _EXAMPLE_PARTS}]}
