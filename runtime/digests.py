"""Digests of files."""

import hashlib
import os


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, read in pieces, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
