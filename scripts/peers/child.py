"""A child process of the benchmark: `python -m scripts.peers.child TASK` measures one engine and prints a reply.

Only the reply goes to standard output; output of libraries goes to standard error. Failures are replies too.
"""

import gc
import os
import sys
import time
import warnings

from llama_adapter.app.measuring.circumstances import circumstances, load_average
from scripts.peers.packages import MissingPackage
from scripts.peers.table import find_engine
from scripts.peers.task import Reply, Task


def main(text: str) -> None:
    reply_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # of vendors, about themselves
    with reply_to:
        reply_to.write(answer(Task.from_json(text)).to_json() + "\n")


def answer(task: Task) -> Reply:
    """Measure the task in this process. Errors become part of the reply."""
    try:
        return _measured(task)
    except MissingPackage as error:
        return Reply(problem="missing", reason=str(error))
    except Exception as error:
        return Reply(problem="failed", reason=f"{type(error).__name__}: {error}".splitlines()[0])


def _measured(task: Task) -> Reply:
    import torch

    from scripts.peers import opening

    torch.set_num_threads(task.threads)
    engine = find_engine(task.section, task.engine)
    about = circumstances(load_before=load_average()) if task.section == "machine" else {}
    started = time.perf_counter()
    if task.only_files:
        opening.file_of(task, engine)
        return Reply(load_s=time.perf_counter() - started)
    opened = opening.open_engine(task, engine)
    gc.collect()  # plain weights that were replaced by packed ones
    load_s = time.perf_counter() - started
    figures = [
        {"name": name, **figure.to_dict(), **more} for name, figure, more in opening.measure(task, engine, opened)
    ]
    return Reply(figures=figures, load_s=load_s, packages=opening.about(engine), circumstances=about)


if __name__ == "__main__":
    main(sys.argv[1])
