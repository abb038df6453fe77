"""The console script `llama-adapter`, which is `python -m llama_adapter`."""

import gc
import signal
import sys
from collections.abc import Sequence

# New objects between two collections. With the 700 of Python 3.11, a short command spends a tenth of its time on them.
gc.set_threshold(50_000)

try:
    from llama_adapter.app.command_line import main as cli
    from llama_adapter.runtime.errors import ExitCode
    from llama_adapter.runtime.terminal.utf8_mode import use_utf8
except KeyboardInterrupt:  # pressed while this is still being imported
    sys.exit(130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line as a process of its own; returns the exit code."""
    if arguments is None:
        use_utf8()
    exit_code = cli.main(arguments)
    if exit_code == ExitCode.INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not change the exit code
    gc.freeze()  # the interpreter's last collection would look at all of torch, for half a second
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
