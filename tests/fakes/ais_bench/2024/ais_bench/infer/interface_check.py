"""The checks of a path that were added in 2024."""

import logging
import os
import re
import stat

_LOG = logging.getLogger(__name__)


def check_model_path_legality(path: str) -> None:
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
