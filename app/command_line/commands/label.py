"""`label`."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from llama_adapter.app.command_line.values import settings, spec_from
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import counted

if TYPE_CHECKING:
    from llama_adapter.app.learning.labelled.label_table import LabelTable
    from llama_adapter.app.pictures.inputs import PictureInput
    from llama_adapter.app.serving.online.service import Service


def run_label(options: argparse.Namespace) -> int:
    spec = spec_from(options)
    from llama_adapter.app.command_line.commands.answering import are_encoded
    from llama_adapter.app.command_line.commands.run_server import ServeJob, check_packages, run_serve
    from llama_adapter.app.learning.labelled.example import class_question
    from llama_adapter.app.learning.labelled.label_table import LabelTable
    from llama_adapter.app.models.stream_model import stored_questions
    from llama_adapter.app.pictures.inputs import InputSpec, read_inputs
    from llama_adapter.app.pictures.inputs.items import LeftOut
    from llama_adapter.app.serving.online.types import ServiceLimits

    inputs = settings(InputSpec, vars(options))
    if are_encoded(inputs):
        raise UsageError(f"`{inputs.paths[0]}` holds encoded pictures, which cannot be shown", hint="name the pictures")
    job = settings(ServeJob, {**vars(options), "spec": spec, "limits": ServiceLimits(), "has_page": True})
    check_packages(has_page=True, command="label")
    question = options.question or stored_questions(spec).question or class_question(options.choices)
    with closing(LabelTable(options.out, question=options.question)) as table:
        left_out = LeftOut()
        pictures = list(read_inputs(inputs, left_out=left_out))
        if left_out and not options.quiet:
            say(f"note: left out: {left_out.note()}")
        if not _can_open_any(pictures, max_bytes=job.limits.max_picture_bytes):
            return ExitCode.PICTURE_ERRORS
        if not options.quiet:
            found = counted(sum(map(_is_there, pictures)), "picture")
            say(f"{found} found, {counted(len(table.rows), 'row')} in {options.out}: label them on the page")
        page = partial(_open_page, pictures=pictures, table=table, question=question, choices=options.choices)
        code = run_serve(job, open_page=page)
        if table.rows and not options.quiet:
            say(f"{counted(len(table.rows), 'row')} in {options.out}, which `llama-adapter train` and `eval` read")
    return code


def _is_there(picture: "PictureInput") -> bool:
    """Whether a picture was found; it may turn out to be damaged."""
    return picture.error is None and (not isinstance(picture.source, str) or os.path.isfile(picture.source))


def _can_open_any(pictures: "Sequence[PictureInput]", *, max_bytes: int) -> bool:
    """Whether there is a picture to show. If no file can be read, the reasons are printed; nothing is decoded."""
    from llama_adapter.app.serving.web.label_session import bytes_of
    from llama_adapter.vision.errors import PictureError

    reasons = []
    for picture in pictures:
        try:
            bytes_of(picture, max_bytes=max_bytes)
            return True
        except PictureError as error:
            reasons.append(error.message)
    for reason in reasons:
        say(f"error: {reason}")
    return False


@contextmanager
def _open_page(
    service: "Service",
    *,
    pictures: "Sequence[PictureInput]",
    table: "LabelTable",
    question: str,
    choices: tuple[str, ...],
) -> Iterator[Any]:
    """The page for labelling."""
    from llama_adapter.app.serving.web.label_session import LabelSession
    from llama_adapter.app.serving.web.labelling import build_labelling

    with closing(LabelSession(service, pictures, table, question=question, choices=choices)) as session:
        yield build_labelling(session)
