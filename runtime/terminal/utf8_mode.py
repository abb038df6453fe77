"""Names of files in every locale."""

import os
import sys
from contextlib import suppress


def use_utf8() -> None:
    """Start this program again in Python's UTF-8 mode, if its locale has another encoding.

    Then names of files and arguments are UTF-8, with other bytes as surrogates, so that records and files are the same
    in every locale. What is printed keeps the encoding of the locale. See PEP 540.
    """
    if sys.getfilesystemencoding() == "utf-8":
        return
    os.environ["PYTHONUTF8"] = "1"  # of processes that this one starts
    os.environ.setdefault("PYTHONIOENCODING", f"{sys.stderr.encoding}:backslashreplace")
    with suppress(OSError):
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
