"""`export onnx`, `export decoder` and `export om`."""

import argparse
from typing import Any

from llama_adapter.app.command_line.model_flags import add_model
from llama_adapter.app.command_line.parser import EXIT_CODES, Parser, command, default
from llama_adapter.app.command_line.values import holding_out, parse_batch_sizes, settings
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.graphs import defaults as export_defaults
from llama_adapter.runtime.terminal.run_guarded import terminated_as_interrupted

_EXPORT = """\
Export encoder and decoder for other runtimes: to ONNX, and from ONNX to OM for Ascend chips.

  llama-adapter export onnx --adapter BIAS-7B.pth --clip ViT-L-14.pt --out clip.onnx
  llama-adapter export decoder --llama-dir LLaMA --adapter BIAS-7B.pth --clip ViT-L-14.pt --out exported
  llama-adapter export om clip.onnx --soc-version Ascend310P3
"""

_EXPORT_ONNX = """\
Export the encoder, including normalisation, to ONNX. It maps `input` (B, S, S, 3), RGB pixels in 0..255, to `output`
(B, Q, D). Before the file is saved, its outputs are compared with the encoder's on pictures, and its operators are
checked against those that Ascend's ATC supports. With --adapter, no LLaMA is needed. Without --clip, ViT-L-14.pt is
searched next to the adapter, in the current folder and in ~/.cache/clip.
"""

_EXPORT_DECODER = """\
Export the decoder as static graphs into a folder, with the tokenizer and the picture encoder. `caption`, `ask`,
`generate` and `serve` run it with --decoder FOLDER, without torch. The folder appears after its logits were compared
with torch's.

  llama-adapter export decoder --out exported
  llama-adapter caption PICTURE --decoder exported
"""

_EXPORT_OM = """\
Convert an ONNX file to OM with Ascend's ATC, which must be installed on this machine. The result is one OM per batch
size, or one with gears for all of them. A side-car FILE.om.json describes each OM. --print-command prints the ATC
command and needs no ATC. If you run that command elsewhere, --adopt FILE.om writes the side-car; pass the same flags.
"""


def add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export", help="export encoder and decoder for other runtimes", description=_EXPORT, epilog=EXIT_CODES
    )
    kinds = export.add_subparsers(metavar="KIND", required=True)

    text = "export the encoder to ONNX"
    command(kinds, "onnx", _run_export_onnx, declare=_declare_onnx, help=text, description=_EXPORT_ONNX)
    text = "export the decoder as static graphs, with tokenizer and encoder"
    command(kinds, "decoder", _run_export_decoder, declare=_declare_decoder, help=text, description=_EXPORT_DECODER)
    text = "convert an ONNX file to OM for Ascend chips"
    command(kinds, "om", _run_export_om, declare=_declare_om, help=text, description=_EXPORT_OM)


def _declare_onnx(parser: Parser) -> None:
    add_model(parser, llama=False)
    onnx = parser.add_argument_group("output", section="output")
    onnx.add_argument("--out", metavar="FILE.onnx", required=True, first=True, help="file to write")
    onnx.add_argument(
        "--dtype",
        key="stored_dtype",
        choices=export_defaults.DTYPES,
        default=export_defaults.DTYPE,
        help=default("precision to store"),
    )
    onnx.add_argument(
        "--opset", type=int, choices=export_defaults.OPSETS, default=export_defaults.OPSET, help=default()
    )
    onnx.add_argument(
        "--pictures",
        section="input",
        metavar="PICTURE",
        nargs="+",
        default=(),
        help="pictures for the comparison (default: the samples)",
    )
    onnx.add_argument("--force", action="store_true", help="replace an existing file")


def _declare_decoder(parser: Parser) -> None:
    add_model(parser)
    out = parser.add_argument_group("output", section="output")
    out.add_argument("--out", metavar="FOLDER", required=True, first=True, help="folder to write")
    out.add_argument(
        "--format",
        key="graph_format",
        choices=export_defaults.DECODER_FORMATS,
        default=export_defaults.DECODER_FORMATS[0],
        help=default("onnx runs in onnxruntime, mindir in MindSpore; onnx-atc is compiled by `export om`"),
    )
    out.add_argument(
        "--precision",
        key="decoder_precision",
        choices=export_defaults.DECODER_PRECISIONS,
        default=export_defaults.DECODER_PRECISIONS[0],
        help=default("number format of the weights; int8 and int4 with --format onnx only"),
    )
    out.add_argument(
        "--without-sampling",
        action="store_true",
        help="draw tokens on the host; the graph only takes the most likely token",
    )
    out.add_argument("--without-encoder", action="store_true", help="leave out the picture encoder")
    out.add_argument("--without-comparison", action="store_true", help="skip the comparison with torch")
    out.add_argument("--force", action="store_true", help="replace an existing export")


@terminated_as_interrupted()
@holding_out
def _run_export_decoder(options: argparse.Namespace) -> int:
    from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder

    values = {
        **vars(options),
        "sampling": not options.without_sampling,
        "encoder": not options.without_encoder,
        "compare": not options.without_comparison,
    }
    run_export_decoder(settings(DecoderJob, values))
    return ExitCode.OK


def _declare_om(parser: Parser) -> None:
    parser.add_argument(
        "onnx",
        section="input",
        metavar="FILE.onnx",
        nargs="?",
        required=True,
        help="file written by `export onnx`; others may work",
    )
    om = parser.add_argument_group("output", section="output")
    om.add_argument(
        "--out", metavar="NAME", help="OM to write, NAME_bsN.om without gears (default: the ONNX file's name)"
    )
    om.add_argument(
        "--batch-sizes",
        section="computation",
        metavar="N,...",
        type=parse_batch_sizes,
        separator=",",
        default=",".join(map(str, export_defaults.BATCH_SIZES)),
        help=default("batch sizes to compile for"),
    )
    om.add_argument("--gears", action="store_true", help="one OM for all batch sizes")
    om.add_argument(
        "--sizes",
        section="computation",
        metavar="NAME=N,...",
        action="append",
        default=[],
        help="a gear of a decoder's graph, such as R=1,S=256,P=1,T=1 (rows, step tokens, cached positions, wanted "
        "tokens); given at least twice",
    )
    om.add_argument(
        "--soc-version", metavar="CHIP", help="such as Ascend310P3 or Ascend910B3 (default: what npu-smi reports)"
    )
    om.add_argument(
        "--precision-mode",
        metavar="MODE",
        default=export_defaults.PRECISION_MODE,
        help=default("fp16, origin, mixed_float16, ..."),
    )
    om.add_argument(
        "--log-level",
        metavar="LEVEL",
        default=export_defaults.LOG_LEVEL,
        help=default("log level of ATC: info, error, ..."),
    )
    om.add_argument(
        "--op-select-implmode",
        "--op_select_implmode",
        metavar="MODE",
        help="ATC's high_performance, high_precision, ... (default: high_performance on a 310P, else ATC's)",
    )
    om.add_argument(
        "--optypelist-for-implmode",
        "--optypelist_for_implmode",
        metavar="OPS",
        help="operators that --op-select-implmode is for (default: Sigmoid,Gelu on a 310P, else all)",
    )
    om.add_argument(
        "--device", key="atc_device", metavar="N", type=int, help="device number for ATC; a conversion needs no device"
    )
    om.add_argument(
        "--atc-flag",
        metavar="FLAG",
        dest="atc_flags",
        action="append",
        default=[],
        help="additional ATC flag, as --atc-flag=--x=y; may be repeated",
    )
    om.add_argument("--print-command", action="store_true", help="print the ATC command without running it")
    om.add_argument("--adopt", metavar="FILE.om", help="write only the side-car, for an OM converted elsewhere")
    om.add_argument("--force", action="store_true", help="replace existing files, and ignore errors of the lint")


@terminated_as_interrupted()
@holding_out
def _run_export_onnx(options: argparse.Namespace) -> int:
    if options.llama_dir is not None and options.adapter is None:
        raise UsageError("The encoder is in --adapter, which is missing; --llama-dir has none")
    from llama_adapter.app.models.graph_export.to_onnx import OnnxJob, run_export_onnx
    from llama_adapter.app.models.spec import EncoderSources

    values = {**vars(options), "pictures": tuple(options.pictures), "sources": settings(EncoderSources, vars(options))}
    run_export_onnx(settings(OnnxJob, values))
    return ExitCode.OK


@terminated_as_interrupted()
def _run_export_om(options: argparse.Namespace) -> int:
    from llama_adapter.app.models.graph_export.to_om import OmJob, run_export_om
    from llama_adapter.runtime.graphs.atc import AtcSettings

    values = {**vars(options), "extra": tuple(options.atc_flags)}
    atc = settings(AtcSettings, values, shown={"extra": "--atc-flag"})
    shown = {"onnx": "FILE.onnx", "batch_sizes": "--batch-sizes", "gears": "--gears"}
    run_export_om(settings(OmJob, {**values, "settings": atc}, shown=shown))
    return ExitCode.OK
