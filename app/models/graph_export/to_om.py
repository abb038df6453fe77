"""`export om`: converts ONNX to OM with ATC, or prints the command for another machine."""

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llama_adapter.app.models.exported import FOR_ATC
from llama_adapter.app.models.graph_export.output import check_place, give, tell, told_complaints, told_next
from llama_adapter.llm.exported.card import CARD_FILE, read_card
from llama_adapter.runtime.atomic_write import refuse_to_replace
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.atc import (
    AtcRequest,
    AtcSettings,
    DimsRequest,
    command,
    make_om,
    plan,
    plan_dims,
)
from llama_adapter.runtime.graphs.gears import parse_gear
from llama_adapter.runtime.graphs.graph import Graph, read_graph
from llama_adapter.runtime.graphs.lint import lint_graph
from llama_adapter.runtime.graphs.sidecar import check_om_path
from llama_adapter.runtime.graphs.toolkit import detect_soc_version, find_atc
from llama_adapter.runtime.locking import locked_output
from llama_adapter.vision.card import EncoderCard


@dataclass(frozen=True, kw_only=True, slots=True)
class OmJob:
    """One run of `export om`."""

    onnx: str
    settings: AtcSettings  # if they name no chip, the chip of this machine is used
    sizes: Sequence[str] = ()  # gears such as R=1,S=256, for a graph with several dynamic sizes, such as a decoder
    out: str | None = None  # None: next to the ONNX file, with its name
    print_command: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if self.out is not None and os.path.basename(self.out) in ("", ".", ".."):
            raise ValueError(f"out must end in a file's name, such as folder/clip, got {self.out!r}")
        for text in self.sizes:
            parse_gear(text)
        if self.sizes and self.settings.gears:
            raise ValueError("sizes exclude gears")


def run_export_om(job: OmJob) -> None:
    """Lint and convert a file, or print the command lines.

    Raises UsageError if an output file exists already, and GraphError if the lint or ATC refuses the file.
    """
    graph = read_graph(job.onnx)
    if graph.card is not None:
        EncoderCard.from_graph(graph.card, file=job.onnx)
    requests = _plan(job, graph)
    for request in requests:
        check_om_path(request.output)  # InferSession would refuse it later
    complaints = lint_graph(graph, has_dims=bool(job.sizes))
    for line in told_complaints(complaints):
        tell(line)
    if job.print_command:
        _print_commands(job, requests)
        return
    errors = [complaint for complaint in complaints if complaint.level == "error"]
    if errors and not job.force:
        raise GraphError(
            f"ATC will refuse `{job.onnx}`: {errors[0].sentence}",
            hint=f"{errors[0].hint}; or try with --force",
        )
    with locked_output(requests[0].output):
        refuse_to_replace([request.output for request in requests], force=job.force)
        check_place(requests[0].output, shown=str(requests[0].output))
        atc = find_atc()
        if not job.sizes and graph.card is None:  # a decoder's side-car identifies its files by marks instead
            tell(f"`{graph.path}` was not exported here: so later checks cannot compare its weights with a model's")
        for request in requests:
            _convert(request, atc=atc)
        if not job.sizes:
            tell(told_next(requests[0].output))


def _plan(job: OmJob, graph: Graph) -> Sequence[AtcRequest | DimsRequest]:
    """The runs of ATC. Raises GraphError if the chip is unknown, and for a graph that ATC cannot convert."""
    output = graph.path.with_suffix("") if job.out is None else Path(job.out)
    settings = replace(job.settings, soc_version=job.settings.soc_version or detect_soc_version())
    if job.sizes:
        folder = graph.path.parent
        if (folder / CARD_FILE).exists() and (found := read_card(folder).format) != FOR_ATC:
            raise GraphError(
                f"The decoder in `{folder}` is exported as {found}, and no OM of it can be run",
                hint=f"export it again with `llama-adapter export decoder --format {FOR_ATC}`",
            )
        return [plan_dims(graph, output, settings, [parse_gear(text) for text in job.sizes])]
    return plan(graph, output, settings)


def _convert(request: AtcRequest | DimsRequest, *, atc: Path) -> None:
    start = time.perf_counter()
    if isinstance(request, DimsRequest):
        sizes = f"{len(request.gears)} gears"
    else:
        sizes = f"batch {', '.join(map(str, request.batch_sizes))}"
    tell(f"ATC compiles for {request.settings.soc_version}, {sizes}; this takes minutes")
    made = make_om(request, atc=atc, tick=lambda seconds: tell(f"ATC has been running for {seconds:.0f} s"))
    tell(f"wrote {made.stat().st_size / 1e6:,.1f} MB", start)
    give(str(request.output))


def _print_commands(job: OmJob, requests: Sequence[AtcRequest | DimsRequest]) -> None:
    for request in requests:
        give(shlex.join(["atc", *command(request)]))
    if job.sizes or job.settings.gears:
        tell("an OM with gears or sizes needs its side-car: run this without --print-command on the machine with ATC")
