"""Captions a folder of pictures in batches and times it, with the variables of the Ascend guide's demo.

Every variable can be set in the environment or as a flag, also DTYPE (`--dtype`). Without any, the embedded model
captions the sample pictures. The guide's demo asks a yes/no question: use `--question "..." --choices Yes,No`. If the
folder of pictures has a questions.jsonl with answers, as the samples have, the embedded model is scored on it at the
end.
"""

import argparse
import dataclasses
import itertools
import os
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_adapter.app.captioning.tasks.choose import parse_choices
from llama_adapter.app.command_line.flags import add_flags
from llama_adapter.app.command_line.main import build_parser
from llama_adapter.app.command_line.parser import Parser, add_config
from llama_adapter.app.command_line.values import parse_text, settings, value_of
from llama_adapter.app.jobs.report import Report, Tally
from llama_adapter.app.models.models_by_name import form_of
from llama_adapter.app.models.parallel.launch import launched_follower
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import AUTO, PLAIN_MODES, CaptionerSpec
from llama_adapter.app.pictures.inputs import InputsError
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.terminal.run_guarded import run_guarded
from llama_adapter.runtime.terminal.utf8_mode import use_utf8
from llama_adapter.runtime.torch_import import prepare_imports

if TYPE_CHECKING:
    from llama_adapter.app.captioning.captioner import Captioner

DEMO_NOTE = (
    "note: this is the embedded model, which knows drawings of one to three plain shapes and nothing else; "
    "for photographs set LLAMA_DIR, BIAS_DIR and CLIP_DIR"
)
KNOWN_ANSWERS = "questions.jsonl"  # in the folder of the pictures
MOST_WRONG = 20  # wrong answers that are shown
# Fields of the spec that are variables here.
VARIABLES = {
    "batch_size": "BATCH_SIZE",
    "llama_dir": "LLAMA_DIR",
    "clip": "CLIP_DIR",
    "adapter": "BIAS_DIR",
    "dtype": "DTYPE",
}


def parser() -> Parser:
    """The guide's variables first; the environment variable of the same name is the default of each flag."""
    parser = Parser(prog="demo_bsz.py", description=__doc__)
    parser.root, parser.variables["dtype"] = build_parser(), "DTYPE"

    def variable(name: str, section: str, help: str, *, kind: type = str, default: Any = None, **declared: Any) -> None:
        flag = "--" + name.lower().replace("_", "-")
        action = parser.add_argument(
            flag, section=section, metavar=name, type=kind, default=default, first=True, help=help, **declared
        )
        parser.variables[action.dest] = name

    text = "number of the accelerator; without one the CPU computes"
    variable("DEVICE_ID", "computation", text, default=0, kind=int)
    text = "side of the square that the model takes; another size than the model's is an error"
    variable("IMG_SIZE", "input", text, default=224, kind=int)
    variable("BATCH_SIZE", "computation", "pictures computed together (default: 5)", default=5, kind=int)
    text = "number of batches; after the last picture they start again from the first (default: all pictures once)"
    variable("INFER_LOOP", "profiling", text, kind=int)
    variable("LLAMA_DIR", "model", "folder with tokenizer.model and a sub-folder of LLaMA weights")
    text = "exported encoder (.om, .onnx) or CLIP weights (ViT-L-14.pt), or a folder with exactly one"
    variable("CLIP_DIR", "model", text, key="clip")
    variable("BIAS_DIR", "model", "adapter (BIAS-7B.pth), or a folder that holds exactly one", key="adapter")
    text, samples = "pictures, folders, patterns or tar archives", os.path.relpath(sample_pictures())
    variable("PIC_FILE_PATH", "input", text, key="pictures", default=[samples], action="append")
    model = parser.add_argument_group("model", section="model")
    model.add_argument("--llama-type", help="sub-folder of LLAMA_DIR (default: the only one with weights, or 7B)")
    model.add_argument("--visual-heads", type=int, help="heads of the visual blocks (default: 16 for width 768)")
    model.add_argument(
        "--channel-order", choices=("auto", "rgb", "bgr"), default="auto", help="colours' order in training"
    )
    prompt = parser.add_argument_group("prompt", section="prompt")
    question = prompt.add_mutually_exclusive_group()
    question.add_argument("--prompt", type=parse_text, help="instruction (default: the model's own for captions)")
    question.add_argument("--question", type=parse_text, help="instruction, for use with --choices")
    prompt.add_argument(
        "--choices", type=value_of(parse_choices), separator=",", help="answer with one of these, for example Yes,No"
    )
    prompt.add_argument(
        "--max-new-tokens",
        section="generation",
        type=int,
        default=SamplingParams.max_new_tokens,
        help="(%(default)s)",
    )
    add_flags(parser, "computation")
    parser.set_defaults(transparency="ignore")  # as the guide's demo reads pictures
    run = parser.add_argument_group("run", section="profiling")
    run.add_argument("--trials", metavar="N", type=int, default=1, help="runs over the batches (%(default)s)")
    run.add_argument(
        "--trace", metavar="FOLDER", help="write a trace of one more run, for Perfetto and chrome://tracing"
    )
    run.add_argument("--no-score", action="store_true", help="leave out the questions that come with the pictures")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    add_config(parser)
    return parser


def only_file(place: str | None, suffixes: tuple[str, ...], *, name: str) -> str | None:
    """The file itself, or the only one in a folder; raises UsageError for a folder with none or several."""
    if place is None or not Path(place).is_dir():
        return place
    files = sorted(str(file) for file in Path(place).iterdir() if file.suffix in suffixes)
    if len(files) != 1:
        found = ", ".join(f"`{Path(file).name}`" for file in files) or "none"
        raise UsageError(
            f"{name} must hold exactly one {' or '.join(suffixes)} file, `{place}` has {found}", hint="name the file"
        )
    return files[0]


def clip_or_encoder(place: str | None) -> dict[str, str | None]:
    """CLIP_DIR: an exported encoder, as in the guide, or CLIP's weights."""
    file = only_file(place, (".om", ".onnx", ".pt", ".safetensors"), name="CLIP_DIR")
    is_encoder = file is not None and file.lower().endswith((".om", ".onnx"))
    return {"encoder" if is_encoder else "clip": file}


def llama_type(llama_dir: str | None) -> str | None:
    """The only model in the folder, else the guide's default, 7B."""
    if llama_dir is None or not Path(llama_dir).is_dir() or form_of(Path(llama_dir)) is not None:
        return None
    models = sorted(params.parent.name for params in Path(llama_dir).glob("*/params.json"))
    return models[0] if len(models) == 1 else "7B"


def numbered_device(number: int) -> str:
    """The accelerator of this number, or the CPU where no accelerator is installed; `auto` for number 0."""
    from llama_adapter.runtime.devices import accelerator_kind

    if number == 0:
        return AUTO
    kind = accelerator_kind()
    if kind is not None:
        return f"{kind}:{number}"
    print(
        f"note: DEVICE_ID is {number}, but there is no accelerator for the decoder: the CPU computes", file=sys.stderr
    )
    return "cpu"


def main() -> int:
    """Read the variables, load the model, run the trials."""
    prepare_imports()
    options = parser().parse_args()
    for name, number in (("INFER_LOOP", options.infer_loop), ("--trials", options.trials)):
        if number is not None and number < 1:
            raise UsageError(f"{name} must be at least 1, got {number}")
    sampling = settings(SamplingParams, {"max_new_tokens": options.max_new_tokens})

    from llama_adapter.app.captioning.captioner import Captioner
    from llama_adapter.app.pictures.reading.isolated import open_reader

    picture_half = clip_or_encoder(options.clip_dir)
    if options.encoder is not None:
        if picture_half.get("encoder") is not None:
            raise UsageError(f"CLIP_DIR names an encoder, `{picture_half['encoder']}`, and so does --encoder")
        picture_half["encoder"] = options.encoder
    values = {
        **vars(options),
        "llama_type": llama_type(options.llama_dir) if options.llama_type is None else options.llama_type,
        **picture_half,
        "adapter": only_file(options.bias_dir, (".pth",), name="BIAS_DIR"),
        "device": numbered_device(options.device_id) if options.device == AUTO else options.device,
    }
    if values["llama_dir"] is not None and values["adapter"] is None:
        raise UsageError("LLAMA_DIR needs BIAS_DIR beside it: a file such as BIAS-7B.pth, or its folder")
    spec = settings(CaptionerSpec, values, shown=VARIABLES)
    if spec.vision_kind == "om" and spec.encoder_device is None:
        spec = dataclasses.replace(spec, encoder_device=options.device_id)
    if (place := launched_follower(spec.tensor_parallel)) is not None:
        from llama_adapter.app.models.parallel.rank_process import run_launched

        return run_launched(place, spec)
    with Captioner.from_spec(spec) as captioner:
        for note in captioner.info.notes:
            print(f"note: {note}", file=sys.stderr)
        with closing(open_reader("process", captioner.spec.pictures, pixels=captioner.pixels)) as captioner.reader:
            return run_trials(captioner, options, sampling)


def run_trials(captioner: "Captioner", options: argparse.Namespace, sampling: SamplingParams) -> int:
    """Warm up, run the trials, print results and times; returns the exit code."""
    from llama_adapter.app.captioning.pictures import given_pictures
    from llama_adapter.app.jobs.wording import one_line, unfamiliar_note
    from llama_adapter.runtime.text import shown_name

    if options.img_size != captioner.image_size:
        raise UsageError(f"IMG_SIZE must be {captioner.image_size}, the size the model takes, got {options.img_size}")
    inputs = given_pictures(options.pic_file_path)
    starts = range(0, len(inputs), options.batch_size)
    num_batches = len(starts) if options.infer_loop is None else options.infer_loop
    pictures = [
        picture
        for start in itertools.islice(itertools.cycle(starts), num_batches)
        for picture in inputs[start : start + options.batch_size]
    ]
    if captioner.spec.is_embedded:
        print(DEMO_NOTE, file=sys.stderr)
    asked = {
        "prompts": options.prompt if options.question is None else options.question,
        "choices": options.choices,
        "max_new_tokens": sampling.max_new_tokens,
    }
    # Graphs of prompts and pictures are recorded when their shape occurs for the second time.
    for _ in range(1 if captioner.info.mode in PLAIN_MODES else 2):
        warm_up = captioner.generate(pictures[: options.batch_size], **asked)
    clock, tally, total_s = captioner.profile_clock(), Tally(), 0.0
    for trial in range(options.trials):
        started = time.perf_counter()
        answers = captioner.generate(pictures, clock=clock, **asked)
        trial_s = time.perf_counter() - started
        total_s += trial_s
        for answer in answers:
            tally.add(answer)
            if trial == 0 and answer.index < len(inputs):
                said = one_line(answer.text) if answer.error is None else f"error: {answer.error.message}"
                print(f"[result]: {shown_name(answer.picture)}: {said}")
        print(f"[trial time]: {trial_s * 1e3:.1f} ms")
    print(f"[avg_time]: {total_s / (options.trials * max(1, num_batches)) * 1e3:.1f} ms\n")
    if options.trace is not None:
        with captioner.tracing(options.trace, tell=lambda text: print(text, file=sys.stderr)):
            captioner.generate(pictures, **asked)
    report = Report(
        tally=tally,
        stages_s=clock.seconds,
        wall_s=total_s,
        model=captioner.info,
        batch_size=options.batch_size,
        num_warm_up_pictures=sum(one.error is None for one in warm_up),
        synchronised=True,
    )
    print(report.format_table(), flush=True)
    last = Tally()
    for answer in answers:
        last.add(answer)
    if note := unfamiliar_note(last):
        print(note, file=sys.stderr)
    if captioner.spec.is_embedded and not options.no_score:
        print_score(captioner, Path(options.pic_file_path[0]) / KNOWN_ANSWERS)
    return ExitCode.PICTURE_ERRORS if tally.num_failed else ExitCode.OK


def print_score(captioner: "Captioner", file: Path) -> None:
    """Ask the questions of the file, and print by task how many answers are exactly right, and the wrong ones.

    Questions about missing and unreadable pictures are counted apart. Without such a file nothing is printed; one that
    cannot be used is reported on stderr.
    """
    from llama_adapter.app.jobs.questions import TemplateError
    from llama_adapter.app.learning.evaluating.outcomes import ask_examples
    from llama_adapter.app.learning.labelled.reading import read_examples
    from llama_adapter.runtime.problems import describe
    from llama_adapter.runtime.text import shown_excerpt, shown_text

    if not os.path.isfile(file):  # `Path.is_file` raises for a name that is too long
        return
    started = time.perf_counter()
    try:
        known = read_examples(str(file), digests=False, looks=False)
        known.require_sound(needs_all_pictures=False)
        tasks = [dataclasses.replace(one, part=one.item.columns.get("task", "-")) for one in known.examples]
        outcomes = ask_examples(captioner, tasks, sampling=SamplingParams())
    except (InputsError, TemplateError, OSError) as error:
        problem = describe(error)
        hint = [f"hint: {problem.hint}"] if problem.hint else []
        lines = [f"note: not scored. {problem.sentence}", *problem.details, *hint]
        print("\n  ".join(map(shown_text, lines)), file=sys.stderr)
        return
    num_unread = len(tasks) - len(outcomes) + sum(one.unreadable is not None for one in known.problems)
    wrong = [one for one in outcomes if one.answer.strip() not in one.references]
    asked, missed = (Counter(shown_excerpt(one.part) for one in some) for some in (outcomes, wrong))
    width = max(map(len, ["task", *asked]))
    print(f"\n{'task':<{width}} {'asked':>6} {'right':>6}")
    for task, number in asked.items():
        print(f"{task:<{width}} {number:>6} {number - missed[task]:>6}")
    for one in wrong[:MOST_WRONG]:
        question, wanted, got, picture = map(
            shown_excerpt,
            (one.question, one.references[0], one.answer, one.picture.removeprefix(f"{file.parent}{os.sep}")),
        )
        print(f"wrong: {question} wanted `{wanted}`, got `{got}` ({picture})")
    if len(wrong) > MOST_WRONG:
        print(f"and {len(wrong) - MOST_WRONG} more wrong")
    if num_unread:
        print(f"questions about pictures that cannot be read: {num_unread}")
    right, elapsed_s = len(outcomes) - len(wrong), time.perf_counter() - started
    print(f"{right} of {len(outcomes)} answers exactly right, in {elapsed_s:.1f} s")


if __name__ == "__main__":
    use_utf8()
    sys.exit(run_guarded(main, debug="--debug" in sys.argv))
