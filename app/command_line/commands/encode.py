"""`encode`."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from llama_adapter.app.command_line.commands.answering import add_pictures, add_resuming, are_encoded, inputs_from
from llama_adapter.app.command_line.model_flags import add_batch_size, add_computation, add_model
from llama_adapter.app.command_line.parser import Parser, command
from llama_adapter.app.command_line.values import settings, spec_from
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import UsageError

_ENCODE = """\
Encode pictures once and store the result in a folder, which `caption` and `ask` take instead of the pictures: one
machine encodes, another one answers and needs no encoder. Only the picture encoder of the model is read: from a bundle,
from an adapter with CLIP, or from an exported encoder. The same command continues an earlier run.

With --text, the keys and values of a text are stored in a .npy file instead, which --past-key-values puts in front of
every prompt. This reads the language model.

  llama-adapter encode photos --recursive --adapter BIAS-7B.pth --clip ViT-L-14.pt --out prefixes
  llama-adapter encode photos --encoder clip.onnx --out prefixes
  llama-adapter caption prefixes --llama-dir LLaMA --adapter BIAS-7B.pth --out captions.jsonl
  llama-adapter encode --text "Answer in one word." --llama-dir LLaMA --out pre_caches.npy
"""


def add_encode(commands: Any) -> None:
    """Add `encode`."""
    command(
        commands, "encode", _run, declare=_declare, help="encode pictures for a decoder elsewhere", description=_ENCODE
    )


def _declare(parser: Parser) -> None:
    add_pictures(parser)
    output = parser.add_argument_group("output", section="output")
    output.add_argument(
        "--out",
        metavar="FOLDER|FILE",
        first=True,
        required=True,
        help="folder for prefixes-*.safetensors and their records; pictures with a record there are skipped. With "
        "--text, a .npy file in the form of PaddleNLP's pre_caches.npy",
    )
    output.add_argument("--text", metavar="TEXT", first=True, help="encode this text, and no pictures")
    output.add_argument(
        "--keys-values",
        action="store_true",
        first=True,
        help="also store the adapter's keys and values: the decoder then need not project them, the files are many "
        "times larger, and the whole model is needed here",
    )
    add_resuming(output)
    output.add_argument(
        "--format",
        choices=("text", "jsonl"),
        help="format on stdout (default: nothing is printed, as records are in --out)",
    )
    output.add_argument(
        "--quiet", action="store_true", help="no progress and no notes on stderr, only errors without a record"
    )
    add_model(parser)
    compute = parser.add_argument_group("computation", section="computation")
    add_batch_size(compute)
    add_computation(compute, decoder=False)


def _run(options: argparse.Namespace) -> int:
    if options.text is not None:
        return _encode_text(options)
    inputs = inputs_from(options)
    if are_encoded(inputs):
        raise UsageError("These pictures are encoded already", hint="`caption` and `ask` take them")
    if os.path.lexists(options.out) and not os.path.isdir(options.out):
        raise UsageError(f"--out is a folder, and `{options.out}` is a file")
    from llama_adapter.app.captioning.tasks.question import Question
    from llama_adapter.app.jobs.encoding import EncodeRunner
    from llama_adapter.app.jobs.job import Job
    from llama_adapter.app.jobs.run import run_job
    from llama_adapter.app.models.spec import EncoderSources
    from llama_adapter.runtime.settings.sources import to_run_again

    given = vars(options)
    if options.keys_values:
        sources, spec = EncoderSources(), spec_from(options)
    else:
        sources = settings(EncoderSources, given)
        unread = dict.fromkeys(("llama_dir", "llama_type", "adapter", "clip", "visual_heads"))
        spec = settings(CaptionerSpec, {**given, **unread, "lora": ()})
    values = {
        "spec": spec,
        "inputs": inputs,
        "questions": (Question(raw=""),),
        "is_encoding": True,
        "out": os.path.join(options.out, ""),
        "settings": to_run_again(options.effective, command="encode"),
    }
    runner = EncodeRunner(sources, keeps="keys_values" if options.keys_values else "queries")
    return run_job(settings(Job, {**given, **values}), runner)


def _encode_text(options: argparse.Namespace) -> int:
    if options.paths or options.lists or options.manifests or options.keys_values:
        raise UsageError("--text excludes pictures and --keys-values", hint="leave these out, or leave out --text")
    if not options.out.endswith(".npy"):
        raise UsageError(f"With --text, --out must be a .npy file, got `{options.out}`")
    if os.path.exists(options.out) and not options.overwrite:
        raise UsageError(f"`{options.out}` exists already", hint="replace it with --overwrite")
    spec = spec_from(options, sees_pictures=False)
    from llama_adapter.app.captioning.encode_text import encode_text

    num_tokens = encode_text(spec, options.text, Path(options.out))
    if not options.quiet:
        sys.stderr.write(f"wrote {num_tokens} tokens to {options.out}\n")
    return 0
