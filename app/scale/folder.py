"""The driver's current folder, on the machines of its workers."""

import os
from contextlib import suppress


def enter_folder(folder: str) -> None:
    """Make relative names mean here what they mean to the driver, where the folder is to be had."""
    with suppress(OSError):
        os.chdir(folder)
