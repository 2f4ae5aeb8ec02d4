"""The rules of the house, checked on the syntax tree of every file.

Each rule is a function from (path, tree or text) to a list of violations. For each there is a test
that it finds nothing in the project and one that it finds what it should in a tiny source string,
so that a rule that can no longer fail is noticed.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megafp8.config.recipes import RECIPES
from tests.tools import figures

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "megafp8"

FLOORS = {
    "errors": 0, "log": 0,
    "config": 1,
    "numerics": 2, "data": 2,
    "parallel": 3, "command": 3,
    "layers": 4, "precision": 4,
    "model": 5,
    "checkpoint": 6, "evaluation": 6,
    "convert": 7,
    "train": 8,
    "report": 9, "launch": 9,
}  # fmt: skip
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
MIN_COMMENT_SHARE = 6.0  # percent of the lines of `figures.EXPLAINED`
MAX_ENTRY_LINES = 60
MAY_READ_ENVIRONMENT = (
    "parallel/startup.py",
    "layers/transformer_engine/",
    "launch/",
    "numerics/products.py",  # what oneDNN, too, takes from there: which units it may use
)
ADAPTERS = {"transformer_engine": "layers/transformer_engine/", "apex": "layers/apex/"}
# Where a recipe may be named; everybody else asks its row for a property.
MAY_NAME_RECIPES = (
    "config/recipes.py",
    "numerics/kernels/",
    "convert/fp8_export.py",  # a mode of that name
)
HEAVY = ("torch", "numpy")
WITHOUT_HEAVY = ("config", "errors", "log")

Rule = Callable[[str, str], list[str]]


def package_files() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def entry_files() -> list[Path]:
    return [path for path in (ROOT / "pretrain_gpt.py",) if path.exists()] + sorted(
        (ROOT / "tools").rglob("*.py")
    )


def owner(path: str) -> str:
    """Return the package or top module that a path below megafp8/ belongs to."""
    return path.split("/")[0].removesuffix(".py")


def imported_modules(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import, those inside functions included.

    `from a import b` yields `a.b`: b may be a module.
    """
    inside = [PACKAGE, *path.removesuffix(".py").split("/")][:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = inside[: len(inside) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def floor_violations(path: str, source: str) -> list[str]:
    if path == "__init__.py":
        return []
    mine, found = owner(path), []
    if mine not in FLOORS:
        return [f"{path}: package {mine} has no floor"]
    for line, name in imported_modules(path, ast.parse(source)):
        parts = name.split(".")
        if parts[0] != PACKAGE or len(parts) < 2 or parts[1] in (mine, "__version__"):
            continue
        if parts[1] not in FLOORS:
            found.append(f"{path}:{line}: {name} is on no floor")
        elif FLOORS[parts[1]] >= FLOORS[mine]:
            found.append(
                f"{path}:{line}: {mine} (floor {FLOORS[mine]}) imports {name} "
                f"(floor {FLOORS[parts[1]]})"
            )
    return found


def file_size_violations(path: str, source: str) -> list[str]:
    lines = len(source.splitlines())
    return [f"{path}: {lines} lines, allowed {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []


def entry_size_violations(path: str, source: str) -> list[str]:
    lines = len(source.splitlines())
    return [f"{path}: {lines} lines, allowed {MAX_ENTRY_LINES}"] if lines > MAX_ENTRY_LINES else []


def function_size_violations(path: str, source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(
                    f"{path}:{node.lineno}: {node.name} has {lines} lines, "
                    f"allowed {MAX_FUNCTION_LINES}"
                )
    return found


def global_violations(path: str, source: str) -> list[str]:
    return [
        f"{path}:{node.lineno}: global {', '.join(node.names)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Global)
    ]


def environment_violations(path: str, source: str) -> list[str]:
    if path.startswith(MAY_READ_ENVIRONMENT):
        return []
    names = {"environ", "environb", "getenv", "putenv"}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in names:
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                found.append(f"{path}:{node.lineno}: os.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [
                f"{path}:{node.lineno}: from os import {alias.name}"
                for alias in node.names
                if alias.name in names
            ]
    return found


def adapter_violations(path: str, source: str) -> list[str]:
    found = []
    for line, name in imported_modules(path, ast.parse(source)):
        home = ADAPTERS.get(name.split(".")[0])
        if home is not None and not path.startswith(home):
            found.append(f"{path}:{line}: imports {name} outside {home}")
    return found


def recipe_name_violations(path: str, source: str) -> list[str]:
    if path.startswith(MAY_NAME_RECIPES):
        return []
    return [
        f"{path}:{node.lineno}: names recipe {node.value!r}; ask its row in config/recipes.py"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and node.value in RECIPES
    ]


def heavy_import_violations(path: str, source: str) -> list[str]:
    if owner(path) not in WITHOUT_HEAVY:
        return []
    return [
        f"{path}:{line}: imports {name}"
        for line, name in imported_modules(path, ast.parse(source))
        if name.split(".")[0] in HEAVY
    ]


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield module-level functions and methods of public classes with a public name."""
    holders: list[ast.AST] = [tree]
    while holders:
        for node in ast.iter_child_nodes(holders.pop()):
            public = not getattr(node, "name", "_").startswith("_")
            if isinstance(node, ast.ClassDef) and public:
                holders.append(node)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and public:
                yield node
            elif isinstance(node, (ast.If, ast.Try)):
                holders.append(node)


def annotation_violations(path: str, source: str) -> list[str]:
    found = []
    for node in public_functions(ast.parse(source)):
        given = node.args
        parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        parameters += [extra for extra in (given.vararg, given.kwarg) if extra is not None]
        missing = [
            parameter.arg
            for index, parameter in enumerate(parameters)
            if parameter.annotation is None
            and not (index == 0 and parameter.arg in ("self", "cls", "ctx"))
        ]
        if node.returns is None:
            missing.append("return")
        if missing:
            found.append(f"{path}:{node.lineno}: {node.name} lacks types of {', '.join(missing)}")
    return found


def docstring_violations(path: str, source: str) -> list[str]:
    tree = ast.parse(source)
    nodes: list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef] = list(
        public_functions(tree)
    )
    nodes += [n for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
    return [
        f"{path}:{node.lineno}: {node.name} has no docstring"
        for node in nodes
        if ast.get_docstring(node) is None and not _overloaded(node)
    ]


def _overloaded(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    names = {getattr(item, "attr", getattr(item, "id", "")) for item in node.decorator_list}
    return bool(names & {"overload", "override", "setter"})


# rule, path of the example, a source that breaks it, part of what the rule says
PACKAGE_RULES: list[tuple[Rule, str, str, str]] = [
    (floor_violations, "config/a.py", "import megafp8.train.loop", "imports megafp8.train.loop"),
    (file_size_violations, "a.py", "\n" * (MAX_FILE_LINES + 1), "401 lines"),
    (
        function_size_violations,
        "a.py",
        "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES,
        "f has 71 lines",
    ),
    (global_violations, "a.py", "x = 0\ndef f():\n    global x\n    x = 1\n", "global x"),
    (environment_violations, "train/a.py", "import os\nx = os.environ['A']\n", "os.environ"),
    (adapter_violations, "layers/native/a.py", "import apex.optimizers\n", "apex.optimizers"),
    (recipe_name_violations, "config/a.py", "x = y.startswith('rowwise')\n", "recipe 'rowwise'"),
    (heavy_import_violations, "config/a.py", "def f():\n    import numpy as np\n", "numpy"),
    (annotation_violations, "a.py", "def f(a: int, b): ...\n", "types of b, return"),
    (docstring_violations, "a.py", "class A:\n    def f(self): ...\n", "f has no docstring"),
]


def ids(value: object) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize("rule", [entry[0] for entry in PACKAGE_RULES], ids=ids)
def test_package_follows(rule):
    found = []
    for path in package_files():
        relative = path.relative_to(ROOT / PACKAGE).as_posix()
        found += rule(relative, path.read_text(encoding="utf-8"))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("rule, path, source, said", PACKAGE_RULES, ids=ids)
def test_rule_can_fail(rule, path, source, said):
    found = rule(path, source)
    assert found and said in found[0], found


def test_entry_points_are_thin():
    found = []
    for path in entry_files():
        found += entry_size_violations(path.name, path.read_text(encoding="utf-8"))
    assert not found, "\n" + "\n".join(found)
    assert entry_size_violations("tool.py", "\n" * (MAX_ENTRY_LINES + 1))


def test_every_package_has_a_floor_and_a_file_to_check():
    assert package_files(), "no files found: the tests above would pass on nothing"
    names = {owner(p.relative_to(ROOT / PACKAGE).as_posix()) for p in package_files()}
    assert names - {"__init__"} <= set(FLOORS)


@pytest.mark.parametrize(
    "path, source",
    [
        ("numerics/a.py", "from megafp8 import data"),
        ("numerics/a.py", "from ..data.loader import Loader"),
        ("numerics/sub/a.py", "from ... import data"),
        ("numerics/a.py", "def f():\n    from megafp8.parallel import mesh"),
        ("report/a.py", "import megafp8.launch.local"),
        ("train/a.py", "from megafp8.somewhere import x"),
        ("somewhere/a.py", "pass"),
    ],
)
def test_floor_rule_sees_every_form_of_import(path, source):
    assert floor_violations(path, source)


@pytest.mark.parametrize(
    "path, source",
    [
        ("data/a.py", "from megafp8.errors import DataError\nfrom megafp8.config import RunConfig"),
        ("data/a.py", "from .index import Index\nfrom megafp8.data import blend"),
        ("train/a.py", "from megafp8 import __version__\nimport torch"),
        ("log.py", "import json"),
    ],
)
def test_floor_rule_allows_lower_floors_and_the_own_package(path, source):
    assert floor_violations(path, source) == []


@pytest.mark.parametrize(
    "rule, path, source",
    [
        (environment_violations, "launch/slurm.py", "import os\nos.getenv('A')"),
        (environment_violations, "train/a.py", "env.environ"),
        (adapter_violations, "layers/transformer_engine/a.py", "import transformer_engine.pytorch"),
        (adapter_violations, "layers/a.py", "from megafp8.layers import transformer_engine"),
        (recipe_name_violations, "config/recipes.py", "x = 'delayed'"),
        (recipe_name_violations, "config/a.py", "def f():\n    'Whether it is delayed.'"),
        (heavy_import_violations, "numerics/a.py", "import torch"),
        (annotation_violations, "a.py", "class A:\n    def f(self, a: int) -> None: ..."),
        (annotation_violations, "a.py", "def _f(a): ..."),
        (docstring_violations, "a.py", "class A:\n    'doc'\n    def _f(self): ..."),
    ],
    ids=ids,
)
def test_rule_allows(rule, path, source):
    assert rule(path, source) == []


def test_environment_rule_sees_imported_names():
    assert environment_violations("train/a.py", "from os import environ")
    assert environment_violations("train/a.py", "import os\nos.getenv('A')")


def test_no_modules_import_each_other_around_a_circle(tmp_path):
    """Also in functions and for types alone: one of them could not be read without the other."""
    assert figures.circles(ROOT) == []
    package = tmp_path / PACKAGE
    package.mkdir()
    (package / "a.py").write_text("def f():\n    from megafp8 import b\n")
    (package / "b.py").write_text("from megafp8.c import x\n")
    (package / "c.py").write_text("if TYPE_CHECKING:\n    from megafp8.a import f\n")
    assert figures.circles(tmp_path) == [["megafp8.a", "megafp8.b", "megafp8.c"]]


@pytest.mark.parametrize("package", figures.EXPLAINED)
def test_shapes_and_reasons_stand_beside_the_code(package):
    files = [path for path in package_files() if path.relative_to(ROOT).parts[1] == package]
    assert figures.comment_share(files) >= MIN_COMMENT_SHARE
