"""The table of everything that we call in torch_npu, with the form of each call, and the page docs/npu-symbols.md.

`python -m tests.npu.symbols` writes the page, with declarations taken from the wheel.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_adapter.runtime.devices.npu_linear import LINEAR
from llama_adapter.runtime.devices.npu_operators import FUSED
from tests.npu.wheel import CHIPS, FakeNpu, fake_npu

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "npu-symbols.md"
SOURCES = sorted((ROOT / "runtime" / "devices").glob("npu*.py"))
MODULES = {
    "torch_npu": "torch_npu",
    "torchair": "torchair",
    "configs": "torchair.configs.compiler_config",
    "graph_configs": "npugraph_ex.configs.compiler_config",
}
COMPILER = ("torch.compile", "backend")


@dataclass(frozen=True, order=True, slots=True)
class Use:
    """A function or attribute, and the arguments of the call."""

    path: str
    is_called: bool = False
    num_positional: int = 0
    keywords: tuple[str, ...] = ()


# The page has their schemas and signatures as the wheel shows them.
OPERATORS = (
    "torch_npu.npu_rms_norm",
    "torch_npu.npu_apply_rotary_pos_emb",
    "torch_npu.npu_swiglu",
    "torch_npu.scatter_update_",
    "torch_npu.npu_weight_quant_batchmatmul",
    "torch_npu.npu_convert_weight_to_int4pack",
    "torch_npu.npu_quant_matmul",
    "torch_npu.npu_dynamic_quant",
    "torch_npu.npu_format_cast",
)
FUNCTIONS = (
    "torch_npu.npu.is_available",
    "torch_npu.npu.device_count",
    "torch_npu.npu.device",
    "torch_npu.npu.set_device",
    "torch_npu.npu.get_device_name",
    "torch_npu.npu.get_soc_version",
    "torch_npu.npu.set_compile_mode",
    "torch_npu.npu.synchronize",
    "torch_npu.npu.current_stream",
    "torch_npu.npu.mem_get_info",
    "torch_npu.npu.empty_cache",
    "torch_npu.npu.Event",
    "torch_npu.profiler.profile",
    "torch_npu.profiler.tensorboard_trace_handler",
    "torchair.get_npu_backend",
    "torchair.configs.compiler_config.CompilerConfig",
    "npugraph_ex.configs.compiler_config.CompilerConfig",
)

# Attributes that are set and never read. The first one cannot be read; a test checks the initial values of the others.
SETTINGS = (
    "torch_npu.npu.config.allow_internal_format",
    "torch_npu.npu.conv.allow_hf32",
    "torch_npu.npu.matmul.allow_hf32",
    "npugraph_ex.configs.compiler_config.CompilerConfig.experimental_config",
)
# Methods of an event, called in runtime/devices/npu.py and base.py, and of the process group, called in collectives.py.
METHODS = (
    "torch_npu.npu.Event.record",
    "torch_npu.npu.Event.synchronize",
    "torch_npu.npu.Event.elapsed_time",
    "torch_npu._C._distributed_c10d.ProcessGroupHCCL.abort_hccl_comm",
)
BACKENDS = ("npugraph_ex",)
BACKEND_OPTIONS = ("frozen_parameter",)


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
            if isinstance(node, ast.Call) and ast.unparse(node.func) == COMPILER[0]:
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


def page(report: dict[str, Any], *, routes: dict[str, str]) -> str:
    """The page, from the report of tests/npu/inside/wheel_facts.py and the routing of attention on each chip."""
    called = {use.path: use for use in sorted(all_uses()) if use.is_called}
    lines = [
        "# Symbols of torch_npu that are used",
        "",
        f"Generated by `python -m tests.npu.symbols` from the wheel of torch_npu {report['version']}. A test checks",
        "that it is up to date. This project calls nothing else of torch_npu or torchair: a test reads",
        "`runtime/devices/npu*.py`. Nothing has run on hardware: schemas, signatures and shapes are those of the real",
        "wheel, which has no kernels.",
        "",
        "## Operators",
        "",
    ]
    for path, schema in sorted(report["operators"].items()):
        checked = report["references"].get(path.removeprefix("torch_npu."), "no meta kernel to compare with")
        lines += [f"- `{path}`", f"  - schema: `{schema}`", f"  - our CPU reference: {checked}"]
    lines += [
        "- `torch.nn.functional.scaled_dot_product_attention`, which torch_npu routes: "
        + "; ".join(f"{soc} to `{name}`" for soc, name in sorted(routes.items())),
        "",
        "## Functions",
        "",
        "| name | signature | called with |",
        "| --- | --- | --- |",
    ]
    for path, signature in sorted(report["functions"].items()):
        use = called.get(path)
        given = "" if use is None else ", ".join(["·"] * use.num_positional + [f"{name}=" for name in use.keywords])
        lines.append(f"| `{path}` | `{signature}` | `({given})` |")
    lines += ["", "## Settings, methods, compilers", ""]
    starts = report["rounding"][0]
    lines += [f"- `{name}` is set" + (f"; it starts as {starts[name]}" if name in starts else "") for name in SETTINGS]
    lines += [f"- `{name}`" for name in METHODS]
    lines += [f'- `torch.compile(backend="{name}")`, options {", ".join(BACKEND_OPTIONS)}' for name in BACKENDS]
    return "\n".join(lines) + "\n"


def current_page(npu: FakeNpu) -> str:
    """The page as it should be now."""
    reports = npu.reports()
    return page(reports["wheel"], routes={soc: reports[soc]["device"]["attention"] for soc in CHIPS})


def main() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(current_page(fake_npu()), encoding="utf-8")


if __name__ == "__main__":
    main()
