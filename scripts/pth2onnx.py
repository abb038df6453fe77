"""Converts an adapter file to the picture encoder as ONNX: `python scripts/pth2onnx.py BIAS-7B.pth`. Needs no LLaMA.

The same as `llama-adapter export onnx --adapter FILE`, under the name and with the file name that Ascend users know.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file can be run from any folder

from llama_adapter.app.command_line.values import settings
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.graphs import defaults
from llama_adapter.runtime.terminal.run_guarded import run_guarded
from llama_adapter.runtime.torch_import import prepare_imports

DEFAULT_OUT = "clip.onnx"


def main(arguments: Sequence[str] | None = None) -> int:
    """Export; returns the exit code. Errors go to stderr as in every command."""
    prepare_imports()
    options = build_parser().parse_args(arguments)
    return run_guarded(lambda: _export(options), debug=options.debug)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("adapter", metavar="ADAPTER", help="adapter, for example BIAS-7B.pth")
    parser.add_argument(
        "--clip",
        metavar="FILE",
        help="CLIP (default: in the adapter's file, else ViT-L-14.pt next to it, here, or in ~/.cache/clip)",
    )
    parser.add_argument("--out", metavar="FILE.onnx", default=DEFAULT_OUT, help="file to write (default: %(default)s)")
    parser.add_argument("--dtype", choices=defaults.DTYPES, default=defaults.DTYPE, help="(default: %(default)s)")
    parser.add_argument(
        "--opset", type=int, choices=defaults.OPSETS, default=defaults.OPSET, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--visual-heads", metavar="N", type=int, help="heads of the visual blocks (default: 16 for width 768)"
    )
    parser.add_argument(
        "--channel-order",
        choices=("auto", "rgb", "bgr"),
        default="auto",
        help="order of colour channels in training (default: bgr for released adapters, else rgb)",
    )
    parser.add_argument(
        "--pictures",
        metavar="PICTURE",
        nargs="+",
        default=(),
        help="pictures, folders, patterns or tar archives for the comparison of graph and encoder",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _export(options: argparse.Namespace) -> int:
    if any(mark in options.adapter for mark in "*?[") and not Path(options.adapter).exists():
        raise UsageError(f"Nothing matches `{options.adapter}`", hint="name the adapter's file, such as BIAS-7B.pth")
    from llama_adapter.app.models.graph_export.to_onnx import OnnxJob, run_export_onnx
    from llama_adapter.app.models.spec import EncoderSources

    sources = settings(EncoderSources, vars(options), shown={"adapter": "ADAPTER"})
    values = {**vars(options), "pictures": tuple(options.pictures), "sources": sources}
    run_export_onnx(settings(OnnxJob, values))
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
