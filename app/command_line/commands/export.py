"""`export onnx`, `export decoder` and `export om`."""

import argparse
from typing import Any

from llama_adapter.app.command_line.flags import add_parser, command
from llama_adapter.app.command_line.values import holding_out, settings
from llama_adapter.app.models.sight import require_sight
from llama_adapter.app.models.spec import CaptionerSpec, EncoderSources
from llama_adapter.runtime.errors import ExitCode
from llama_adapter.runtime.graphs import defaults as usual
from llama_adapter.runtime.terminal.run_guarded import terminated_as_interrupted


def add_export(commands: Any) -> None:
    """Add the commands of `export`."""
    kinds = add_parser(commands, "export").add_subparsers(metavar="KIND", required=True)
    defaults: dict[str, Any] = {"dtype": usual.DTYPE, "opset": usual.OPSET}
    command(kinds, "export onnx", _run_export_onnx, defaults=defaults)
    defaults = {"format": usual.DECODER_FORMATS[0], "precision": usual.DECODER_PRECISIONS[0]}
    command(kinds, "export decoder", _run_export_decoder, defaults=defaults)
    sizes = ",".join(map(str, usual.BATCH_SIZES))
    defaults = {"batch_sizes": sizes, "precision_mode": usual.PRECISION_MODE, "log_level": usual.LOG_LEVEL}
    command(kinds, "export om", _run_export_om, defaults=defaults)


@holding_out
def _run_export_decoder(options: argparse.Namespace) -> int:
    from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder

    values = {
        **vars(options),
        "spec": settings(CaptionerSpec, {**vars(options), "precision": None}),
        "sampling": not options.without_sampling,
        "encoder": not options.without_encoder,
        "compare": not options.without_comparison,
    }
    run_export_decoder(settings(DecoderJob, values))
    return ExitCode.OK


@holding_out
def _run_export_onnx(options: argparse.Namespace) -> int:
    from llama_adapter.app.models.early import require_model

    sources = settings(EncoderSources, vars(options))
    require_sight(sources)
    require_model(sources)
    from llama_adapter.app.models.graph_export.to_onnx import OnnxJob, run_export_onnx

    run_export_onnx(settings(OnnxJob, {**vars(options), "sources": sources}))
    return ExitCode.OK


@terminated_as_interrupted()
def _run_export_om(options: argparse.Namespace) -> int:
    from llama_adapter.app.models.graph_export.to_om import OmJob, run_export_om
    from llama_adapter.runtime.graphs.atc import AtcSettings

    values = {**vars(options), "extra": options.atc_flags}
    atc = settings(AtcSettings, values, shown={"extra": "--atc-flag"})
    shown = {"onnx": "FILE.onnx", "batch_sizes": "--batch-sizes", "gears": "--gears"}
    run_export_om(settings(OmJob, {**values, "settings": atc}, shown=shown))
    return ExitCode.OK
