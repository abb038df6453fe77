"""Llama 3's `tokenizer.model`: lines with the base64 of a piece and its rank, as the package tiktoken reads them."""

import base64
import binascii
import json
from typing import Final

from llama_adapter.llm.pieces.json_pieces import LETTERS
from llama_adapter.llm.pieces.made_json import LLAMA_3, added_token, begun_by, byte_level, merges_of
from llama_adapter.runtime.errors import CheckpointError

END_IDS: Final = (128_001, 128_008, 128_009)  # of a text, a message and a turn
_NUM_PIECES: Final = 128_000
_NUM_MARKS: Final = 256
# Names by their place behind the pieces, from meta-llama/llama-models, `models/llama3/tokenizer.py`. The others are
# reserved. "finetune_right_pad_id" and "step_id" are of Llama 3.1.
_NAMES: Final = {
    **{0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 5: "step_id", 6: "start_header_id"},
    **{7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"},
}


def is_byte_ranks(data: bytes) -> bool:
    """Whether the bytes begin as a table of ranks does: with the base64 of one byte, and a 0."""
    return data[:6].endswith(b"== 0") or data[:7].endswith(b"== 0\n")


def ranks_to_json(data: bytes, *, name: str, num_pieces: int = _NUM_PIECES) -> bytes:
    """The `tokenizer.json` of a table of byte ranks with Llama 3's pattern and special tokens.

    A piece's merges are all ways to cut it into two pieces; the lowest rank is merged first. Raises CheckpointError for
    another number of pieces, because other tables have other patterns.
    """
    try:
        lines = [line.split() for line in data.splitlines()]
        ranks = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in lines}
    except (ValueError, binascii.Error):
        ranks = {}
    if sorted(ranks.values()) != list(range(num_pieces)):
        raise CheckpointError(
            f"`{name}` is a table of {len(ranks):,} byte ranks, and that of Llama 3 has {num_pieces:,}",
            hint="use the `tokenizer.json` of the model's Hugging Face folder",
        )
    spelled = {"".join(LETTERS[byte] for byte in piece): ranks[piece] for piece in sorted(ranks, key=ranks.__getitem__)}
    names = [f"<|{_NAMES.get(place, f'reserved_special_token_{place}')}|>" for place in range(_NUM_MARKS)]
    content = {
        "version": "1.0",
        "added_tokens": [added_token(own, num_pieces + place) for place, own in enumerate(names)],
        "post_processor": begun_by(names[0], num_pieces),
        **byte_level(spelled, merges_of(spelled, spelled), pattern=LLAMA_3, ignore_merges=True),
    }
    return json.dumps(content, ensure_ascii=False).encode()
