"""`eval`."""

import argparse
import os
from typing import Any

from llama_adapter.app.captioning.tasks.choose import parse_choices
from llama_adapter.app.command_line.commands.answering import SAMPLING, add_reading, add_resuming
from llama_adapter.app.command_line.model_flags import add_batch_size, add_computation, add_model, add_sample_fields
from llama_adapter.app.command_line.parser import Parser, command, default
from llama_adapter.app.command_line.values import parse_text, settings, spec_from, value_of
from llama_adapter.runtime.errors import UsageError

_EVAL = """\
Ask labelled examples and say how good the answers are: accuracy, F1, confusion matrix, ROC-AUC and calibration of
choices; exact matches of open answers; BLEU, ROUGE-L and CIDEr-D of captions. Each figure has a 95 % interval.

DATA is a table, a folder of folders by class, a webdataset archive or a known set: docs/labelled-data.md. The figures
are printed as Markdown. --out receives the answers, the reports and a page with the pictures of the worst answers. The
same command continues an interrupted run.

  llama-adapter eval photos --question "Which animal is this?" --out scores-a
  llama-adapter eval photos --question "Which animal is this?" --model tuned --out scores-b --against scores-a
"""


def add_eval(commands: Any) -> None:
    """Add `eval`."""
    command(commands, "eval", _run, declare=_declare, help="score answers about labelled pictures", description=_EVAL)


def _declare(parser: Parser) -> None:
    parser.add_argument(
        "data",
        section="input",
        first=True,
        required=True,
        metavar="DATA",
        nargs="*",
        help="tables, folders, archives or known sets with the right answers",
    )
    group = parser.add_argument_group("data", section="input")
    group.add_argument(
        "--question",
        section="prompt",
        metavar="TEXT",
        type=parse_text,
        first=True,
        help="question for examples without one; {name} is replaced by that column (default: the one that the model "
        "stores)",
    )
    group.add_argument(
        "--choices",
        section="prompt",
        metavar="A,B,...",
        type=value_of(parse_choices),
        separator=",",
        first=True,
        help="possible answers for all examples (default: each example's own)",
    )
    group.add_argument(
        "--task",
        choices=("choices", "open", "captions"),
        first=True,
        help="choices scores the given choices; open and captions generate answers (default: depends on the data)",
    )
    group.add_argument("--answer-column", metavar="NAME", help="column of the right answers (default: the usual ones)")
    group.add_argument(
        "--picture-folder", metavar="FOLDER", help="pictures of a known set (default: where they usually lie)"
    )
    add_sample_fields(group)
    group.add_argument(
        "--split",
        metavar="NAME",
        first=True,
        help="only the examples of this split; all takes every example (default: test, if the data name it, else all)",
    )
    group.add_argument(
        "--limit", metavar="N", type=int, first=True, help="at most N examples, drawn by picture with --seed"
    )
    group.add_argument(
        "--seed",
        section="generation",
        metavar="S",
        type=int,
        default=0,
        help=default("seed of this draw and of the intervals"),
    )
    add_reading(group)
    output = parser.add_argument_group("output", section="output")
    output.add_argument(
        "--out",
        metavar="FOLDER",
        first=True,
        required=True,
        help="receives answers.jsonl, outcomes.jsonl, scores.json, scores.md and scores.html; examples with an answer "
        "there are not asked again",
    )
    output.add_argument(
        "--against",
        metavar="FOLDER",
        first=True,
        help="the --out folder of another model or question on the same data, to compare with",
    )
    add_resuming(output)
    output.add_argument("--quiet", action="store_true", help="no progress and no notes on stderr")
    add_model(parser)
    answer = parser.add_argument_group("answer", section="generation")
    answer.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=int,
        default=SAMPLING.max_new_tokens,
        help=default("maximum number of tokens of an answer"),
    )
    compute = parser.add_argument_group("computation", section="computation")
    add_batch_size(compute)
    add_computation(compute)


def _run(options: argparse.Namespace) -> int:
    if os.path.lexists(options.out) and not os.path.isdir(options.out):
        raise UsageError(f"--out is a folder, and `{options.out}` is a file")
    spec = spec_from(options, sees_pictures=False)  # data may be text alone
    from llama_adapter.app.learning.evaluating.data import DataSettings
    from llama_adapter.app.learning.evaluating.job import EvaluationJob, run_evaluation
    from llama_adapter.runtime.settings.sources import to_run_again

    given = vars(options)
    values = {
        "spec": spec,
        "data": settings(DataSettings, {**given, "data": tuple(options.data)}),
        "settings": to_run_again(options.effective, command="eval"),
    }
    return run_evaluation(settings(EvaluationJob, {**given, **values}))
