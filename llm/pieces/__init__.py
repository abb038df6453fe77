"""Kinds of tokenizer files: SentencePiece models, `tokenizer.json`, tables of byte ranks, and those in GGUF files.

In: the bytes of a file. Out: their pieces, from which `llm/tokenizer.py` makes a `Tokenizer`. Read
`sentence_pieces.py` first.
"""
