"""Prints the figures by which the house is judged; `tests/test_architecture.py` holds some of them.

python tests/tools/figures.py [FOLDER]      of this tree, or of another one
"""

import ast
import statistics
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ("model", "layers", "numerics", "parallel", "train", "data")
EXPLAINED = ("numerics", "parallel")
RECIPES = ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")


def files(root: Path) -> list[Path]:
    """Return the package's files, in order."""
    return sorted((root / "megafp8").rglob("*.py"))


def lines(path: Path) -> int:
    """Return the lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def comment_share(paths: list[Path]) -> float:
    """Return the percentage of lines that hold a comment."""
    found = 0
    for path in paths:
        with path.open("rb") as file:
            tokens = tokenize.tokenize(file.readline)
            found += len({t.start[0] for t in tokens if t.type == tokenize.COMMENT})
    return 100 * found / max(sum(map(lines, paths)), 1)


def names_recipe(path: Path) -> bool:
    """Whether a string literal of a file, docstrings apart, is the name of a recipe."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(n, ast.Constant) and n.value in RECIPES for n in ast.walk(tree))


def module_of(path: Path, root: Path) -> str:
    """Return the dotted name of a file."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, root: Path, modules: set[str]) -> Iterator[str]:
    """Yield the package's modules that a file imports, in functions and for types, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.append(inner if inner in modules else node.module)
        yield from (name for name in names if name in modules)


def circles(root: Path) -> list[list[str]]:
    """Return the groups of modules that import each other around a circle (Tarjan, 1972)."""
    modules = {module_of(path, root): path for path in files(root)}
    graph = {
        name: sorted(set(imports(path, root, set(modules))) - {name})
        for name, path in modules.items()
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def main() -> None:
    """Print the figures."""
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    paths = files(root)
    sizes = {path: lines(path) for path in paths}
    total = sum(sizes.values())
    core = sum(n for path, n in sizes.items() if path.relative_to(root).parts[1] in CORE)
    longest = max(paths, key=sizes.__getitem__)
    print(f"files {len(paths)}, lines {total}")
    print(f"outside of {', '.join(CORE)}: {100 * (1 - core / total):.1f} % of the lines")
    median = statistics.median(sizes.values())
    print(f"median file {median:.0f} lines, longest {sizes[longest]} ({longest.relative_to(root)})")
    print(f"circles of imports: {circles(root)}")
    for package in EXPLAINED:
        inside = [path for path in paths if path.relative_to(root).parts[1] == package]
        print(f"comments in {package}: {comment_share(inside):.1f} % of the lines")
    named = [str(path.relative_to(root)) for path in paths if names_recipe(path)]
    print(f"files that name a recipe in a string: {len(named)} {named}")


if __name__ == "__main__":
    main()
