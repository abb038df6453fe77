"""A `llama-adapter` command whose processes are forks of one warm process that has loaded torch, which takes seconds.

    with warm_command(folder) as command:  # words of a shell
        subprocess.run(f"{command} caption x.png", shell=True)

The command sends its arguments, standard streams, current folder, variables, umask and ignored signals to the warm
process through a socket. A fork of the warm process runs the command line and exits like an interpreter. The command
forwards the signals that it receives, and exits as the fork did.

These tests do not cover how an interpreter starts; tests in `tests/e2e` start real ones. Slow work is done once per
test run: tracing the embedded model's encoder for `export`, and examining the environment for `doctor`. `train` takes
fewer steps.
"""

import io
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

_LENGTH, _CODE = struct.Struct("!I"), struct.Struct("!i")
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_USED = ("captioning.captioner", "models.graph_export.decoder", "jobs.run")
_DEFAULT = {signal.SIGINT: signal.default_int_handler}  # for other signals the default is SIG_DFL


@contextmanager
def warm_command(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the command; it works until the context ends. `folder` holds the socket. Needs Linux."""
    import subprocess  # imported here so that the command itself starts without it

    address = os.path.join(folder, "warm.sock")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        warm = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_start", "serve", str(listener.fileno())],
            stdin=subprocess.PIPE,  # stays open while the tests run
            stdout=subprocess.DEVNULL,
            cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
            env={**variables, "OMP_NUM_THREADS": "1"},
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C must reach only the commands, which forward it
        )
    with warm:
        yield f"{sys.executable} -IS {os.path.abspath(__file__)} ask {address}"
        assert warm.stdin is not None
        warm.stdin.close()
    assert warm.returncode == 0


def _ask(address: str, arguments: list[str]) -> NoReturn:
    """Let the warm process run the command, and exit as the command did."""
    umask = os.umask(0)
    os.umask(umask)
    ignored = [number for number in _PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
    request = {"arguments": arguments, "variables": dict(os.environ), "umask": umask, "ignored": ignored}
    body = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [_LENGTH.pack(len(body))], [0, 1, 2, os.open(".", os.O_RDONLY)])
        server.sendall(body)
        for number in set(_PASSED_ON).difference(ignored):
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        answer = server.recv(_CODE.size, socket.MSG_WAITALL)
    if len(answer) < _CODE.size:
        sys.exit("the warm process of the tests has ended")
    (code,) = _CODE.unpack(answer)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _serve(listener: socket.socket) -> bool:
    """True in a fork that must run its command; False in the warm process, after the tests have ended."""
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"a fork has one thread, and this process has {num_threads}"
    while True:
        ready, _, _ = select.select([0, listener], [], [])
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if 0 in ready:
            return False
        client, _ = listener.accept()
        if os.fork():
            client.close()
            continue
        listener.close()
        request, files = _received(client)
        if command := os.fork():
            for file in files:
                os.close(file)
            _keep(client, command)
        client.close()
        _become(request, files)
        return True


def _received(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, files, _, _ = socket.recv_fds(client, _LENGTH.size, 4)
    (length,) = _LENGTH.unpack(head)
    return json.loads(client.recv(length, socket.MSG_WAITALL)), files


def _keep(client: socket.socket, command: int) -> NoReturn:
    """Forward signals to the process and its exit code to the client; kill the process if the client is gone."""
    ends = os.pidfd_open(command)
    while True:
        ready, _, _ = select.select([client, ends], [], [])
        if ends in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
            with suppress(BrokenPipeError):
                client.sendall(_CODE.pack(code))
            os._exit(0)
        signals = client.recv(64)
        for number in signals or [signal.SIGKILL]:
            os.kill(command, number)
        if not signals:
            os._exit(0)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Set up streams, folder, variables and signals as a newly started interpreter would find them."""
    *streams, current = files
    for number, file in enumerate(streams):
        os.dup2(file, number)
    os.fchdir(current)
    for file in files:
        os.close(file)
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["variables"])
    for number in _PASSED_ON:
        is_ignored = number in request["ignored"]
        signal.signal(number, signal.SIG_IGN if is_ignored else _DEFAULT.get(number, signal.SIG_DFL))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        binary = open(number, "wb" if number else "rb", 0 if old.write_through else -1, closefd=False)  # noqa: SIM115
        buffering = {"line_buffering": old.line_buffering, "write_through": old.write_through}
        stream = io.TextIOWrapper(binary, old.encoding, old.errors, **buffering)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv[1:] = request["arguments"]
    if request["arguments"] and (prepare := _PREPARED.get(request["arguments"][0])):
        prepare()
    given = os.environ.get("PYTHONPATH")
    sys.path[:1] = [os.getcwd(), *(os.path.abspath(folder) for folder in (given.split(os.pathsep) if given else []))]


def _share_encoder() -> None:
    from tests.app.exported import shared_encoder

    shared_encoder().__enter__()


def _share_environment() -> None:
    from dataclasses import asdict

    from llama_adapter.app.command_line.doctor import command
    from llama_adapter.app.command_line.doctor.environment import Probe, look_at_environment
    from tests.fakes.exported import made_once

    def look() -> list[Probe]:
        with made_once("environment.json") as (path, is_missing):
            if is_missing:
                path.write_text(json.dumps([asdict(probe) for probe in look_at_environment()]))
        return [Probe(**values) for values in json.loads(path.read_text())]

    command.look_at_environment = look


def _shorten_training() -> None:
    from llama_adapter.app.learning.training import eye, job

    eye._FEWEST_BLOCK_STEPS, job._STEPS_OVER_TRAINED_EYE = 5, 10


_PREPARED = {"export": _share_encoder, "doctor": _share_environment, "train": _shorten_training}


def _load() -> None:
    """Import what most commands import, except onnxruntime, which would start a thread."""
    import importlib

    from llama_adapter.runtime.torch_import import prepare_imports

    prepare_imports()
    for name in _USED:
        importlib.import_module(f"llama_adapter.app.{name}")


if __name__ == "__main__":
    role, place, *words = sys.argv[1:]
    if role == "ask":
        _ask(place, words)
    import gc

    from llama_adapter.__main__ import main

    _load()
    gc.freeze()  # objects that are never collected stay shared with the forks
    if _serve(socket.socket(fileno=int(place))):
        sys.exit(main())
