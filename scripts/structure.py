"""Counts lines, files and modules with a single importer in a checkout, and import cycles of files and of folders.

python -m scripts.structure                                   this checkout
python -m scripts.structure OTHER --packages app vision llm   another one, with packages of other names
"""

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import grimp

from scripts.common import ROOT, parser_of


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of two or more names that import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for name in imports:
        seen, pending = set[str](), [name]
        while pending:
            new = imports.get(pending.pop(), set()) - seen
            seen |= new
            pending += new
        reached[name] = seen
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in imports}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--packages", nargs="+", default=["llama_adapter"])
    options = parser.parse_args()
    root = options.checkout.resolve()
    sys.path.insert(0, str(root))
    graph = grimp.build_graph(*options.packages, cache_dir=None, exclude_type_checking_imports=True)
    imports = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    rooms: dict[str, set[str]] = defaultdict(set)
    depth = 3 if "llama_adapter" in options.packages else 2
    room_of = {module: ".".join(module.split(".")[:depth]) for module in imports}
    for module, imported in imports.items():
        rooms[room_of[module]] |= {room_of[other] for other in imported} - {room_of[module]}
    single = [module for module in imports if len(graph.find_modules_that_directly_import(module)) == 1]
    for name, folders in {
        "product": ("llama_adapter", "app", "vision", "llm", "runtime"),
        "scripts": ("scripts",),
        "tests": ("tests",),
    }.items():
        files = {file.resolve() for folder in folders for file in (root / folder).rglob("*.py")}
        num_lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        print(f"{name}: {num_lines:,} lines in {len(files)} files")
    print(f"modules with a single importer: {len(single)} of {len(imports)}")
    for what, found in {"files": circles(imports), "rooms": circles(rooms)}.items():
        print(f"circles of {what}: {len(found)}", *(" ".join(group) for group in found), sep="\n  ")


if __name__ == "__main__":
    main()
