"""Digests of files."""

import hashlib
import os


def file_digest(*paths: str | os.PathLike[str]) -> str:
    """SHA-256, in hexadecimal, of a file or of several files concatenated. They are read in pieces."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
