"""Kinds of tokenizer files: SentencePiece models, `tokenizer.json`, and tables of byte ranks.

In: the bytes of a file. Out: their pieces, from which `llm/tokenizer.py` makes a `Tokenizer`. Read
`sentence_pieces.py` first.
"""
