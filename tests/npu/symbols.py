"""Every use of torch_npu in our sources, with the form of each call; the wheel is asked whether it takes them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_adapter.runtime.devices.npu_linear import LINEAR
from llama_adapter.runtime.devices.npu_operators import FUSED

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "runtime" / "devices").glob("npu*.py"))
MODULES = {
    "torch_npu": "torch_npu",
    "torchair": "torchair",
    "configs": "torchair.configs.compiler_config",
    "graph_configs": "npugraph_ex.configs.compiler_config",
}
# Methods of an event, called in runtime/devices/npu.py and base.py, and of the process group, called in collectives.py.
METHODS = (
    "torch_npu.npu.Event.record",
    "torch_npu.npu.Event.synchronize",
    "torch_npu.npu.Event.elapsed_time",
    "torch_npu._C._distributed_c10d.ProcessGroupHCCL.abort_hccl_comm",
)
BACKENDS = ("npugraph_ex",)
BACKEND_OPTIONS = ("frozen_parameter",)


@dataclass(frozen=True, order=True, slots=True)
class Use:
    """A function or attribute, and the arguments of the call."""

    path: str
    is_called: bool = False
    num_positional: int = 0
    keywords: tuple[str, ...] = ()

    @property
    def operator(self) -> str:
        """The name of the operator that it is; "" for other functions and attributes."""
        module, _, name = self.path.rpartition(".")
        return name if module == "torch_npu" else ""


def uses(source: str) -> Iterator[Use]:
    """Every chain of names that begins with a module of torch_npu, with the form of its call or assignment."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        path = _path(node)
        parent = parents.get(node)
        if path is None or isinstance(parent, ast.Attribute):
            continue
        if isinstance(parent, ast.Call) and parent.func is node:
            keywords = tuple(keyword.arg or "**" for keyword in parent.keywords)
            yield Use(path, True, len(parent.args), keywords)
        elif "." in path:
            yield Use(path)


def all_uses() -> set[Use]:
    """The uses in all sources, and the attributes that the operator table looks up by name."""
    found = {use for file in SOURCES for use in uses(file.read_text(encoding="utf-8"))}
    needed = {fused.needs for fused in FUSED if fused.needs} | {name for one in LINEAR for name in one.needs}
    return found | {Use(f"torch_npu.{name}") for name in needed}


def compile_calls() -> Iterator[dict[str, Any]]:
    """The literal keyword arguments of every torch.compile call."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.compile":
                yield {
                    keyword.arg or "**": keyword.value.value
                    for keyword in node.keywords
                    if isinstance(keyword.value, ast.Constant)
                }


def _path(node: ast.AST) -> str | None:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    if node.id == "self" and names[:1] == ["_torch_npu"]:
        return ".".join(["torch_npu", *names[1:]])
    if node.id in MODULES:
        return ".".join([MODULES[node.id], *names])
    return None
