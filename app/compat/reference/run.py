"""Runs a program of LLaMA-Adapter or MindFormers as Python does, with modules of this package in place of theirs."""

import io
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from llama_adapter.app.compat.foreign import PROGRAMS
from llama_adapter.app.compat.reference import llama, mindformers
from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError, UsageError
from llama_adapter.runtime.terminal.stderr_lines import say

LLAMA: Final = ("llama", "llama.llama_adapter", "llama.tokenizer", "llama.utils")
_PARTS: Final = (
    *("pipeline", "models", "models.llama", "models.llama.llama_tokenizer", "models.bloom"),
    *("models.bloom.bloom_tokenizer", "generation", "core", "core.context", "infer", "infer.infer_config"),
    *("infer.infer_task", "inference", "inference.infer_config", "inference.infer_task"),
)
MINDFORMERS: Final = ("mindformers", *(f"mindformers.{part}" for part in _PARTS))
_COMMANDS: Final = {"cv2": "pip install opencv-python", "clip": "pip install git+https://github.com/openai/CLIP.git"}


def run_program(program: str, arguments: Sequence[str], *, overrides: Mapping[str, Any]) -> int:
    """Run a Python file as `__main__`; returns its exit code.

    An error of the program is printed as Python prints it; the exit code is then 1.

    Parameters:
        program: path of the file.
        arguments: the rest of its `sys.argv`.
        overrides: fields of `CaptionerSpec` that replace what the program chooses.

    Raises UsageError if the file cannot be read, and errors of this package that the program does not handle.
    """
    try:
        with io.open_code(str(Path(program).absolute())) as file:
            source = file.read()
    except OSError as error:
        raise UsageError(f"The program `{program}` cannot be read: {error.strerror}", hint=PROGRAMS) from None
    with _as_main(program, arguments, overrides, source) as main:
        try:
            exec(compile(source, program, "exec", dont_inherit=True), vars(main))
        except SystemExit as request:
            return _exit_code(request)
        except LlamaAdapterError:
            raise
        except Exception as error:
            _print(error)
            return ExitCode.FAILED
    return ExitCode.OK


@contextmanager
def _as_main(
    program: str, arguments: Sequence[str], overrides: Mapping[str, Any], source: bytes
) -> Iterator[types.ModuleType]:
    """The program's module `__main__`. Sets sys.argv, sys.path and sys.modules for it, and restores them at the end."""
    main = types.ModuleType("__main__")
    main.__file__ = program
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [program, *arguments], [str(Path(program).resolve().parent), *path]
    modules = {"__main__": main, **dict.fromkeys(LLAMA, llama)}
    installed = find_spec("mindformers")
    if installed is None or installed.origin is None:  # without an origin, it is a folder without a package
        modules |= dict.fromkeys(MINDFORMERS, mindformers)
    elif b"mindformers" in source:
        say(f"note: the program gets the installed package `mindformers`, {installed.origin}")
    saved = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    llama.LLaMA_adapter.overrides = overrides
    mindformers.begin(overrides)
    try:
        yield main
    finally:
        llama.LLaMA_adapter.overrides = {}
        mindformers.begin({})
        sys.argv, sys.path = argv, path
        for name, module in saved.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _exit_code(request: SystemExit) -> int:
    """The exit code that Python would end with. Prints the message, if there is one."""
    if request.code is None or isinstance(request.code, int):
        return request.code or ExitCode.OK
    say(request.code)
    return ExitCode.FAILED


def _print(error: Exception) -> None:
    """Print the traceback without the frames of this file, and a hint if a module is missing."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)
    if isinstance(error, ImportError) and (hint := _missing(error)):
        say(f"\nhint: {hint}")


def _missing(error: ImportError) -> str:
    package = (error.name or "").partition(".")[0]
    for module, names in ((llama, LLAMA), (mindformers, MINDFORMERS)):
        if package == names[0] or error.name == module.__name__:
            return f"provided here are {', '.join(module.__all__)}, for inference; training needs the package itself"
    if isinstance(error, ModuleNotFoundError) and package:
        how = f": {_COMMANDS[package]}" if package in _COMMANDS else ""
        return f"the program needs the package of `{package}`; install it in this environment{how}"
    return ""
