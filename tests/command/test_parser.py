"""The tools' command lines: each mistake is one line with exit code 2, and --help is complete."""

import argparse
import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from megafp8.command.parser import ToolParser, path_text, positive, to_path
from megafp8.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("tools", "bench", "tests/tools")
TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("*.py"))


def run(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a tool's `main` in this process and return its exit code."""
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    try:
        return module.main()
    except SystemExit as end:
        return int(end.code or 0)


def test_every_option_of_every_script_has_a_text() -> None:
    found = 0
    for script in sorted(path for name in SCRIPTS for path in (ROOT / name).glob("*.py")):
        for call in ast.walk(ast.parse(script.read_text())):
            is_option = (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr == "add_argument"
            )
            if is_option:
                found += 1
                named = {keyword.arg for keyword in call.keywords}
                assert "help" in named, f"{script}:{call.lineno}"
    assert found > 40


GENERATE = ["--load", "nowhere"]
TRAIN = ["--input", "in.jsonl", "--output", "out", "--type", "bpe", "--vocab-size", "300"]
ENCODE = ["--input", "in.jsonl", "--output-prefix", "out", "--tokenizer-type"]


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("generate", [], "required: --load"),
        ("generate", ["--laod", "x"], "--laod: unknown option; did you mean --load?"),
        ("generate", ["--load", ""], "--load: it is empty"),
        ("generate", [*GENERATE, "--load", "x"], "--load: given twice"),
        ("generate", [*GENERATE, "--promt=x"], "--promt: unknown option; did you mean --prompt?"),
        ("generate", [*GENERATE, "-p", "x"], "unrecognized arguments: -p x"),
        ("generate", [*GENERATE, "--seed", "x"], "--seed: found 'x', allowed an integer"),
        ("generate", [*GENERATE, "--temperature", "x"], "found 'x', allowed a finite number"),
        ("generate", [*GENERATE, "--temperature", "-1"], "allowed 0 or a positive number"),
        ("generate", [*GENERATE, "--max-new-tokens", "0"], "found 0, allowed a positive integer"),
        ("inspect_checkpoint", ["--load", "x"], "--load: unknown option"),
        ("reshard_checkpoint", ["--load", "a", "--save", "b", "--fsdp-size", "2.5"], "an integer"),
        (
            "reshard_checkpoint",
            ["--num-layers-per-virtual-pipeline-stage", "0"],
            "stage: found 0, allowed a positive integer",
        ),
        ("convert_checkpoint", ["--form", "hf"], "--form: unknown option; did you mean --from"),
        ("convert_checkpoint", ["--seq-length", "0"], "found 0, allowed a positive integer"),
        ("train_tokenizer", [*TRAIN, "--max-bytes", "0"], "found 0, allowed a positive integer"),
        ("train_tokenizer", [*TRAIN, "--max-bytes", "10MB"], "found '10MB', allowed an integer"),
        ("train_tokenizer", [*TRAIN, "--json-key", "a"], "did you mean --json-keys"),
        ("train_tokenizer", [*TRAIN, "--input", "b"], "--input: given twice; give it once"),
        ("train_tokenizer", [*TRAIN[:3], "", *TRAIN[4:]], "--output: it is empty"),
        ("train_tokenizer", ["--input", "", *TRAIN[2:]], "--input: it is empty"),
        ("preprocess_data", [*ENCODE, "Byte"], "invalid choice: 'Byte'"),
        ("preprocess_data", [*ENCODE, "ByteTokenizer", "--workers", "0"], "a positive integer"),
        (
            "preprocess_data",
            [*ENCODE, "ByteTokenizer", "--vocab-size", "9"],
            "for --tokenizer-type",
        ),
        (
            "preprocess_data",
            [*ENCODE, "NullTokenizer", "--vocab-size", "9", "--tokenizer-model", "x"],
            "--tokenizer-type NullTokenizer takes no --tokenizer-model",
        ),
    ],
)
def test_a_mistake_is_one_line(
    tool: str,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(tool, arguments, monkeypatch) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err, shown.err
    assert shown.err.startswith("error: ") and len(shown.err.splitlines()) == 1


@pytest.mark.parametrize("tool", TOOLS)
def test_help_describes_every_option(
    tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tool, ["--help"], monkeypatch) == 0
    text = capsys.readouterr().out
    assert "None" not in text and "False" not in text and "[]" not in text
    entries = re.split(r"\n(?=  -)", text.partition("\noptions:\n")[2])
    assert len(entries) > 1
    for entry in entries:
        flags = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", entry)
        words = re.sub(r"^\s*(-h, )?--[\w-]+( [A-Z_]+)*", "", flags).split()
        assert words, f"{tool}: no text for {entry}"


# Flags whose text is no path: patterns, names, words.
NO_PATHS = {
    "--exclude",
    "--glob",
    "--ignore-config-field",
    "--json-keys",
    "--max-shard-size",
    "--prompt",
}


class Parser(Exception):
    """Carries a tool's parser out of its `main`."""


@pytest.mark.parametrize("tool", TOOLS)
def test_every_path_of_every_tool(
    tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def caught(self: ToolParser, *args: object) -> None:
        raise Parser(self)

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ToolParser, "parse_args", caught)
    with pytest.raises(Parser) as thrown:
        run(tool, [], monkeypatch)
    (parser,) = thrown.value.args
    paths = 0
    for action in parser._actions:
        if action.nargs == 0 or action.choices or action.type in (int, float, positive):
            continue
        name = (action.option_strings or [action.dest])[0]
        if action.type is None:
            assert name in NO_PATHS, f"{tool} {name}: a path needs its type"
            continue
        paths += 1
        assert str(action.type("~/x")) == f"{tmp_path}/x", name
        with pytest.raises(argparse.ArgumentTypeError, match=r"found '\$HOME/x', allowed a path"):
            action.type("$HOME/x")
    assert paths


def test_no_folder_of_the_name_of_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "d.jsonl").write_text('{"text": "one"}\n')
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    encode = ["--input=~/d.jsonl", "--tokenizer-type", "ByteTokenizer"]
    assert run("preprocess_data", [*encode, "--output-prefix=~/c"], monkeypatch) == 0
    assert (tmp_path / "home/c_text_document.bin").is_file()
    assert run("preprocess_data", [*encode, "--output-prefix=$HOME/c"], monkeypatch) == 2
    assert "argument --output-prefix: found '$HOME/c', allowed a path" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_texts_that_look_like_options() -> None:
    parser = ToolParser("")
    parser.add_argument("--prompt")
    parser.add_argument("rest", nargs="*")
    for text in ("-- a comment", "--load is a flag", "-1"):
        assert parser.parse_args(["--prompt", text]).prompt == text
    assert parser.parse_args(["--prompt=--load"]).prompt == "--load"
    assert parser.parse_args(["--prompt", "a", "--", "--x", "--x"]).rest == ["--x", "--x"]


def test_types() -> None:
    assert to_path("a") == Path("a") and path_text(" a") == " a" and positive("3") == 3


def test_percent_signs_in_defaults_are_shown() -> None:
    parser = ToolParser("")
    parser.add_argument("--format", default="%d", help="of a date")
    assert "of a date (default %d)" in parser.format_help()


def test_errors_of_several_lines_become_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        ToolParser("").error("two\nlines")
    assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_file_where_a_folder_is_needed(tmp_path: Path) -> None:
    from megafp8.data.train_tokenizer import train_tokenizer

    (tmp_path / "in.txt").write_text("text")
    with pytest.raises(DataError, match=r"--output .*in\.txt is a file, expected a folder"):
        train_tokenizer([str(tmp_path / "in.txt")], tmp_path / "in.txt", 300, "bpe")
