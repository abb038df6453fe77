"""`export onnx` and `export om`."""

import argparse
from typing import Any

from llama_adapter.app.cli.model_flags import add_model
from llama_adapter.app.cli.parser import EXIT_CODES, command, default
from llama_adapter.app.cli.values import parse_batch_sizes, settings
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.graphs import defaults as export_defaults

_EXPORT = """\
Write the picture encoder as a file for other runtimes: as ONNX, and an ONNX file as OM for Ascend chips.

  llama-adapter export onnx --adapter BIAS-7B.pth --clip ViT-L-14.pt --out clip.onnx
  llama-adapter export om clip.onnx --soc-version Ascend310P3
"""

_EXPORT_ONNX = """\
Write the encoder as ONNX, with normalisation inside: `input` (B, S, S, 3), RGB pixels in 0..255, to `output` (B, Q, D).
The file is compared with the encoder on pictures, and with what Ascend's ATC takes, before it is put in place. With
--adapter no LLaMA is needed; without --clip, ViT-L-14.pt is looked for beside the adapter, here and in ~/.cache/clip.
"""

_EXPORT_OM = """\
Convert an ONNX file to OM by Ascend's ATC, which has to be installed here: an OM for each batch size, or one with gears
for all of them. Beside each OM a side-car FILE.om.json says what is in it. --print-command needs no ATC; an OM that its
line has made gets its side-car by --adopt FILE.om, with the flags that it was made with.
"""


def add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export", help="write the encoder for other runtimes", description=_EXPORT, epilog=EXIT_CODES
    )
    kinds = export.add_subparsers(metavar="KIND", required=True)

    onnx = command(kinds, "onnx", _run_export_onnx, help="the encoder as ONNX", description=_EXPORT_ONNX)
    add_model(onnx, llama=False)
    onnx.add_argument("--out", metavar="FILE.onnx", required=True, help="file to write")
    onnx.add_argument("--dtype", choices=export_defaults.DTYPES, default=export_defaults.DTYPE, help=default())
    onnx.add_argument(
        "--opset", type=int, choices=export_defaults.OPSETS, default=export_defaults.OPSET, help=default()
    )
    onnx.add_argument(
        "--pictures", metavar="PICTURE", nargs="+", default=(), help="to compare with (default: sample pictures)"
    )
    onnx.add_argument("--force", action="store_true", help="replace the file when it is there already")

    om = command(kinds, "om", _run_export_om, help="an ONNX file as OM for Ascend chips", description=_EXPORT_OM)
    om.add_argument("onnx", metavar="FILE.onnx", help="written by `export onnx`; others are tried too")
    om.add_argument("--out", metavar="NAME", help="OM to write, NAME_bsN.om without gears (default: as the ONNX file)")
    om.add_argument(
        "--batch-sizes",
        metavar="N,...",
        type=parse_batch_sizes,
        default=",".join(map(str, export_defaults.BATCH_SIZES)),
        help=default("to compile for"),
    )
    om.add_argument("--gears", action="store_true", help="one OM that takes any of the batch sizes")
    om.add_argument(
        "--soc-version", metavar="CHIP", help="such as Ascend310P3 or Ascend910B3 (default: as npu-smi says)"
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
        help=default("of ATC: info, error, ..."),
    )
    om.add_argument(
        "--atc-flag", metavar="FLAG", dest="atc_flags", action="append", default=[], help="further, as --atc-flag=--x=y"
    )
    om.add_argument("--print-command", action="store_true", help="print what to run, and convert nothing")
    om.add_argument(
        "--adopt", metavar="FILE.om", help="write the side-car of an OM that atc made elsewhere, and convert nothing"
    )
    om.add_argument("--force", action="store_true", help="replace files, and convert what the lint refuses")


def _run_export_onnx(options: argparse.Namespace) -> int:
    if options.llama_dir is not None and options.adapter is None:
        raise UsageError("--llama-dir holds no encoder: it is in --adapter, which is missing")
    from llama_adapter.app.encoder_export.to_onnx import EncoderSources, OnnxJob, run_export_onnx

    values = {**vars(options), "pictures": tuple(options.pictures), "sources": settings(EncoderSources, vars(options))}
    run_export_onnx(settings(OnnxJob, values))
    return ExitCode.OK


def _run_export_om(options: argparse.Namespace) -> int:
    from llama_adapter.app.encoder_export.to_om import OmJob, run_export_om
    from llama_adapter.runtime.graphs.atc import AtcSettings

    values = {**vars(options), "extra": tuple(options.atc_flags)}
    atc = settings(AtcSettings, values, shown={"extra": "--atc-flag"})
    shown = {"onnx": "FILE.onnx", "batch_sizes": "--batch-sizes", "gears": "--gears"}
    run_export_om(settings(OmJob, {**values, "settings": atc}, shown=shown))
    return ExitCode.OK
