"""`eval` and `bench`: how good and how fast a model is."""

import argparse
import json
import os
import sys

from llama_adapter.app.command_line.values import require_folder, settings, spec_from
from llama_adapter.runtime.atomic_write import require_place, write_text
from llama_adapter.runtime.errors import ExitCode
from llama_adapter.runtime.plots import check_plot


def run_eval(options: argparse.Namespace) -> int:
    require_folder(options.out)
    spec = spec_from(options, sees_pictures=False)  # data may be text alone
    from llama_adapter.app.captioning.tasks.question import Question
    from llama_adapter.app.jobs.job import Job
    from llama_adapter.app.learning.evaluating.data import DataSettings
    from llama_adapter.app.learning.evaluating.job import ANSWERS, EvaluationJob, run_evaluation
    from llama_adapter.app.pictures.inputs import InputSpec
    from llama_adapter.llm.engine.sampling_params import SamplingParams
    from llama_adapter.runtime.settings.sources import to_run_again

    given = vars(options)
    data = settings(DataSettings, given)
    values = {
        "spec": spec,
        "inputs": InputSpec(paths=data.data),
        "questions": (Question(instruction=data.question),),
        "sampling": settings(SamplingParams, {"max_new_tokens": options.max_new_tokens}),  # --seed is of the draw
        "out": os.path.join(options.out, ANSWERS),
        "settings": to_run_again(options.effective, command="eval"),
    }
    answering = settings(Job, {**given, **values})
    return run_evaluation(EvaluationJob(data=data, out=options.out, against=options.against, answering=answering))


def run_bench(options: argparse.Namespace) -> int:
    spec = spec_from(options)
    if options.out is not None:
        require_place(options.out)
    if options.plot is not None:
        check_plot(options.plot)
    if options.random is None:
        from llama_adapter.app.models.early import require_model

        require_model(spec)
    from llama_adapter.app.command_line.measuring.bench import BenchJob
    from llama_adapter.app.command_line.measuring.bench import run_bench as measure
    from llama_adapter.app.command_line.measuring.bench_report import format_table, write_plot

    values = {name: value for name, value in vars(options).items() if name != "question" or value is not None}
    job = settings(BenchJob, {**values, "spec": spec})
    tell = (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr))
    result = measure(job, tell=tell)
    as_json = json.dumps(result.to_dict(), indent=1)
    if options.out is not None:
        write_text(options.out, f"{as_json}\n")
    if options.plot is not None:
        write_plot(result, options.plot)
    print(as_json if options.json else format_table(result))
    return ExitCode.OK
