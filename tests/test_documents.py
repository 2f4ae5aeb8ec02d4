"""README, docs, scripts and messages: what they name is there, nothing is left to be filled in."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from megafp8.config.cli import CONTROL_OPTIONS
from megafp8.config.megatron_flags import ACCEPTED, ACCEPTED_VALUES, REFUSED
from megafp8.config.names import targets

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_placeholders(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), f"{document.name}: {target} is not there"
    assert not re.findall(r"@[A-Z]+@|TODO|FIXME", text)


# Texts that users read: what they name has to be there. The changelog tells of what was.
TEXTS = [
    path
    for path in (*DOCUMENTS, *sorted((ROOT / "scripts").rglob("*")))
    if path.is_file() and path.name != "CHANGELOG.md"
]
CODE = [ROOT / "pretrain_gpt.py", *sorted((ROOT / "megafp8").rglob("*.py"))]
PROGRAMS = sorted(
    path for name in ("tools", "bench", "tests/tools") for path in ROOT.glob(f"{name}/*.py")
)
PARTS = ("bench", "docs", "megafp8", "scripts", "tests", "tools")
TREE = {str(path.relative_to(ROOT)) for part in PARTS for path in (ROOT / part).rglob("*")}
NAMES = {Path(name).name for name in TREE} | {path.name for path in ROOT.iterdir()}
# Flags and files of other programs, and words that stand for a flag.
OTHERS = {
    "pip": "--disable-pip-version-check --find-links --no-build-isolation --no-deps --no-index "
    "--quiet --target --clear",
    "torchrun": "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id "
    "--signals-to-handle",
    "srun and sbatch": "--cpus-per-task --exclusive --gpus-per-node --job-name --kill-on-bad-exit "
    "--nodes --ntasks --ntasks-per-node --open-mode --requeue --signal --time",
    "pytest": "--dist --numprocesses --pdb",
    "cmp, git, python": "--silent --version",
    "placeholders and an arrow": "--cast --flag --name --no-name --no-some-name --some-name",
    "DeepSpeed": "zero_to_fp32.py",
    "torch": "_meta_registrations.py distributed_c10d.py",
    "what scripts/gpu_check.sh writes": "gpu_check.md OUT.md",
    "CUDA, builds of apex and TransformerEngine": "CUDA_DEVICE_MAX_CONNECTIONS APEX_CPP_EXT "
    "APEX_CUDA_EXT UB_SKIPMC",
}
FOREIGN = {word for words in OTHERS.values() for word in words.split()}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]\b(?!-)")
FILE = re.compile(r"[\w./-]*\w\.(?:py|sh|sbatch|md)\b")
INSIDE = re.compile(rf"(?<![\w./-])(?:{'|'.join(PARTS)})/[\w./-]*\w")
MODULE = re.compile(r"-m ((?:megafp8|bench)\b[\w.]*\w)")
VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")
PROGRAM = re.compile(r"\b(?:pretrain_gpt|(?:tests/tools|tools|bench)/\w+)\.py\b")


def texts_of(path: Path) -> list[str]:
    """The strings of a Python file, the values in them as `{}`; docstrings among them."""
    found, inside = [], set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            found.append("".join(map(str, parts)))
            inside.update(map(id, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [] if id(node) in inside else [node.value]
    return found


@cache
def options_of(program: str) -> frozenset[str]:
    """The flags of one of our programs."""
    if program == "pretrain_gpt.py":
        fields = {"--" + name.replace("_", "-") for name in targets()}
        return frozenset(fields | {*CONTROL_OPTIONS, *ACCEPTED, *ACCEPTED_VALUES})
    source = (ROOT / program).read_text(encoding="utf-8")
    texts = texts_of(ROOT / program)
    flags = {text for text in texts if FLAG.fullmatch(text)}
    if 'add_argument(f"--{name}"' in source:
        flags |= {f"--{text}" for text in texts}
    if "add_input_arguments" in source:
        flags |= {*texts_of(ROOT / "megafp8/command/parser.py")}
    if "parse_known_args" in source:
        flags |= options_of("pretrain_gpt.py")  # the rest is passed on
    return frozenset(flags | {"--help"})


@cache
def all_options() -> frozenset[str]:
    programs = [str(path.relative_to(ROOT)) for path in PROGRAMS]
    ours = ["pretrain_gpt.py", "bench/gpu/check.py", *programs]
    return frozenset().union(*map(options_of, ours))


def leads_nowhere(text: str) -> list[str]:
    """What a text names and nothing has: files, flags, and flags of another program of ours."""
    found = []
    modules = [f"{name.replace('.', '/')}.py" for name in MODULE.findall(text)]
    found += [name for name in (*INSIDE.findall(text), *modules) if name not in TREE]
    found += [name for name in FILE.findall(text) if Path(name).name not in NAMES | FOREIGN]
    found += [flag for flag in FLAG.findall(text) if flag not in all_options() | FOREIGN]
    # A command: the flags after a program's name, to the end of the line or sentence.
    joined = re.sub(r"\\\n\s*", " ", text)
    for match in PROGRAM.finditer(joined):
        if match[0] not in {*TREE, "pretrain_gpt.py"}:
            continue
        command = re.split(r"[;|&`\n)]|\. |, |\w\.py\b", joined[match.end() :])[0]
        flags = FLAG.findall(command)
        options = options_of(match[0]) | FOREIGN
        found += [f"{match[0]} {flag}" for flag in flags if flag not in options]
    return found


def test_what_texts_name_is_there() -> None:
    found = {path: [path.read_text(encoding="utf-8")] for path in TEXTS}
    found |= {path: texts_of(path) for path in (*CODE, *PROGRAMS)}
    nowhere = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, texts in found.items()
        for text in texts
        if not REFUSED.keys() >= {*text.split()}  # the names of flags that are refused, alone
        for name in leads_nowhere(text)
    }
    assert not nowhere, "\n".join(sorted(nowhere))
    flags = {flag for texts in found.values() for text in texts for flag in FLAG.findall(text)}
    assert len(flags) > 200


def test_variables_of_the_documents_are_read_somewhere() -> None:
    code = [*CODE, *(path for path in TEXTS if path.suffix != ".md")]
    read = {name for path in code for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
    for document in DOCUMENTS:
        named = set(VARIABLE.findall(document.read_text(encoding="utf-8")))
        assert not named - read - FOREIGN, document.name


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("use tools/checkpoint.py, or docs/no/log.py", ["tools/checkpoint.py", "docs/no/log.py"]),
        ("see evaluate.py and scripts/configs/no.yaml", ["scripts/configs/no.yaml", "evaluate.py"]),
        ("python -m megafp8.launch.no", ["megafp8/launch/no.py"]),
        ("python -m bench.gpu.no and python -m bench.gpu.check", ["bench/gpu/no.py"]),
        ("give --no-such-flag", ["--no-such-flag"]),
        ("use --skip-train", ["--skip-train"]),
        (
            "python tools/generate.py --load x --micro-batch-size 2",
            ["tools/generate.py --micro-batch-size"],
        ),
        ("python tools/generate.py --load x \\\n  --input 2", ["tools/generate.py --input"]),
        ("tools/preprocess_data.py --input a; --micro-batch-size 2, --load", []),
        ("scripts/quickstart.sh, --load and --no-bf16", []),
    ],
)
def test_a_pointer_that_leads_nowhere_is_found(text: str, named: list[str]) -> None:
    assert leads_nowhere(text) == named
