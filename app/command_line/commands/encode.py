"""`encode`."""

import argparse
import os
import sys
from pathlib import Path

from llama_adapter.app.command_line.commands.answering import are_encoded, inputs_from
from llama_adapter.app.command_line.values import require_folder, settings, spec_from
from llama_adapter.app.models.sight import require_sight
from llama_adapter.app.models.spec import CaptionerSpec, EncoderSources
from llama_adapter.runtime.errors import UsageError


def run_encode(options: argparse.Namespace) -> int:
    if options.text is not None:
        return _encode_text(options)
    inputs = inputs_from(options)
    if are_encoded(inputs):
        raise UsageError("These pictures are encoded already", hint="`caption` and `ask` take them")
    require_folder(options.out)
    from llama_adapter.app.captioning.tasks.question import Question
    from llama_adapter.app.jobs.encoding import EncodeRunner
    from llama_adapter.app.jobs.job import Job
    from llama_adapter.app.jobs.run import run_job
    from llama_adapter.runtime.settings.sources import to_run_again

    given = vars(options)
    if options.keys_values:
        sources, spec = EncoderSources(), spec_from(options)
    else:
        sources = settings(EncoderSources, given)
        unread = dict.fromkeys(("llama_dir", "llama_type", "adapter", "clip", "visual_heads"))
        spec = settings(CaptionerSpec, {**given, **unread, "lora": ()})
        if spec.vision_kind == "torch":  # an exported encoder needs no model
            require_sight(sources)
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
    from llama_adapter.app.models.early import require_model

    require_model(spec)
    from llama_adapter.app.captioning.encode_text import encode_text

    num_tokens = encode_text(spec, options.text, Path(options.out))
    if not options.quiet:
        sys.stderr.write(f"wrote {num_tokens} tokens to {options.out}\n")
    return 0
