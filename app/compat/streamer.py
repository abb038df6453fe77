"""Streamers: objects with `put` and `end`, as in transformers and MindFormers."""

import sys
from collections.abc import Iterable, Iterator
from queue import Queue
from typing import Any, Protocol, TextIO


class Streamer(Protocol):
    """What `pipeline` calls for each answer: `put` with the prompt's token ids, `put` with new ids, then `end`."""

    def put(self, value: Any) -> None: ...

    def end(self) -> None: ...


class Decoder(Protocol):
    """The part of a tokenizer that a streamer needs."""

    def decode(self, token_ids: list[int]) -> str: ...


class TextStreamer:
    """Prints each answer while it is generated, then a line feed. Subclasses may override `on_finalized_text`."""

    def __init__(
        self,
        tokenizer: Decoder | None = None,
        skip_prompt: bool = False,
        skip_special_tokens: bool = True,
        *,
        file: TextIO | None = None,
    ) -> None:
        """By default, `tokenizer` is that of the pipeline, and `file` is stdout.

        Special tokens have no text in LLaMA's tokenizer, so `skip_special_tokens` must be True. Raises ValueError.
        """
        if not skip_special_tokens:
            raise ValueError("skip_special_tokens must be True: LLaMA's special tokens have no text")
        self.tokenizer, self.skip_prompt, self._file = tokenizer, skip_prompt, file
        self._is_prompt = True
        self._ids: list[int] = []
        self._told = ""

    def put(self, value: Any) -> None:
        """Take token ids: a number, a list, or an array or tensor of one row. The first call has the prompt's ids.

        Raises ValueError for several rows, or if there is no tokenizer.
        """
        ids = _flat(value)
        is_prompt, self._is_prompt = self._is_prompt, False
        if is_prompt and self.skip_prompt:
            return
        if self.tokenizer is None:
            raise ValueError("TextStreamer needs a tokenizer outside a pipeline")
        self._ids += ids
        text = self.tokenizer.decode(self._ids)
        if not text.endswith("\ufffd"):  # half a character
            self.on_finalized_text(text[len(self._told) :])
            self._told = text

    def end(self) -> None:
        """End the answer: pass on the rest of its text, and prepare for the next answer."""
        text = self.tokenizer.decode(self._ids) if self.tokenizer is not None and self._ids else ""
        self.on_finalized_text(text[len(self._told) :], stream_end=True)
        self._is_prompt, self._ids, self._told = True, [], ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with each new piece of text, and at the end of an answer."""
        print(text, end="\n" if stream_end else "", file=self._file or sys.stdout, flush=True)


class TextIteratorStreamer(TextStreamer):
    """Iterates over the pieces of one answer, while a pipeline generates it in another thread."""

    def __init__(
        self, tokenizer: Decoder | None = None, skip_prompt: bool = False, timeout: float | None = None
    ) -> None:
        """`timeout`: the longest wait for a piece, in seconds; then iteration raises `queue.Empty`. None: no limit."""
        super().__init__(tokenizer, skip_prompt)
        self._timeout = timeout
        self._pieces: Queue[str | None] = Queue()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._pieces.put(text)
        if stream_end:
            self._pieces.put(None)

    def __iter__(self) -> Iterator[str]:
        while (piece := self._pieces.get(timeout=self._timeout)) is not None:
            yield piece


def _flat(value: Any) -> list[int]:
    ids = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(ids, Iterable):
        return [int(ids)]
    rows = list(ids)
    if rows and isinstance(rows[0], Iterable):
        if len(rows) > 1:
            raise ValueError(f"a streamer takes one answer at a time, got {len(rows)} rows")
        rows = list(rows[0])
    return [int(token_id) for token_id in rows]
