"""`get`."""

import argparse
from pathlib import Path

from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError, UsageError
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.terminal.run_guarded import terminated_as_interrupted
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import shown_name


@terminated_as_interrupted()
def run_get(options: argparse.Namespace) -> int:
    from llama_adapter.app.models.named.getting import obtain
    from llama_adapter.app.models.named.hub_source import SCHEME
    from llama_adapter.app.models.named.located import parts_of

    if options.list:
        if options.names or options.check:
            raise UsageError("--list goes without names and --check")
        return _list()
    if not options.names:
        raise UsageError("get needs a name", hint="`llama-adapter get --list` lists the names")
    wanted = {name: parts_of(name) for name in options.names}
    code = ExitCode.OK
    for name, parts in wanted.items():
        if options.check:
            for weights in parts.values():
                for checked in weights.source.check():
                    print(f"{checked.fault or 'right'}: {shown_name(checked.path)}")
                    code = ExitCode.FAILED if checked.fault else code
        else:
            found = obtain(parts, name=name, consent="yes" if options.yes else "ask", tell=say)
            for kind, path in found.items():
                print(f"{kind:8}{shown_name(path)}")
            if name.startswith(SCHEME):
                _make_bundle(found["model"])
    return code


def _make_bundle(place: Path) -> None:
    """Make a bundle of a LLaMA, in the number format that fits the memory, and print its path."""
    from llama_adapter.app.models.named.ready import ready_texts
    from llama_adapter.app.models.spec import CaptionerSpec

    try:
        if (bundle := ready_texts(place, CaptionerSpec(), tell=say)) is not None:
            print(f"{'bundle':8}{shown_name(bundle)}")
    except LlamaAdapterError as error:  # the weights are there, and another machine may take them
        say(f"note: there is no bundle of it: {describe(error).sentence}")


def _list() -> int:
    from llama_adapter.app.models.named.catalogue import KINDS, read_catalogue
    from llama_adapter.app.models.named.source import shown_bytes

    for kind in KINDS:
        print(f"{kind}:")
        for name, part in read_catalogue()[kind].items():
            state = "here" if part.source.here() else "on request" if part.asks else ""
            size = shown_bytes(part.bytes) if part.bytes else "?"
            print(f"  {name:22}{size:>8}  {state:10}  {part.licence}: {part.home}")
    return ExitCode.OK
