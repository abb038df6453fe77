"""The console script `llama-adapter`, which is `python -m app`."""

import sys

from app.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
