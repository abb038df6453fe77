"""The checks that came with 2024: of the path, the device and the feeds."""

import logging
import os
import re
import stat
from typing import Any

_LOG = logging.getLogger(__name__)


def check_model_path_legality(path: str) -> None:
    if not path:
        raise RuntimeError("empty model path!")
    absolute = os.path.abspath(path)
    if re.search(r"[^_A-Za-z0-9/.-]", absolute) or len(absolute) > 4096 or max(map(len, absolute.split("/"))) > 255:
        raise ValueError("The path string is illegal. Please check.")
    if not os.path.isfile(absolute):
        raise ValueError(f"The path:{path} is not a file.")
    status = os.stat(absolute)
    reasons = {
        "is a soft link": os.path.islink(absolute),
        "is not its user's": status.st_uid != os.geteuid() and status.st_gid not in os.getgroups(),
        "is group writable, or is others writable": status.st_mode & (stat.S_IWGRP | stat.S_IWOTH),
        "cannot be read": not os.access(absolute, os.R_OK) or not status.st_mode & stat.S_IRUSR,
    }
    for reason, applies in reasons.items():
        if applies:
            _LOG.error("path: %s %s", absolute, reason)
            raise ValueError(f"The path:{path} is illegal. Please check the error log for more detail.")
    if os.path.splitext(absolute)[1] != ".om":
        raise ValueError(f"The suffix of path:{path} not in ['om']. Please check.")
    if status.st_size > 10 * 1024**3:
        raise ValueError(f"The file:{path} size is larger than {10 * 1024**3}. Please check.")


def check_device_range_valid(device_id: Any) -> None:
    if not isinstance(device_id, int):
        raise TypeError(f"device:{device_id} is not a integer!")
    if not 0 <= device_id <= 255:
        raise ValueError(f"device:{device_id} is illegal. legal value range is [0, 255]")


def check_feeds(feeds: Any) -> None:
    if not isinstance(feeds, list):
        raise ValueError("the list be checked is not a list!")
    if not feeds:
        raise ValueError("the list is empty")
    if len(feeds) > 1024:
        raise ValueError("the list's length is over 1024!")
