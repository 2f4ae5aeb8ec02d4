"""What a folder gives: links once each, nothing hidden, and a line about what is left out."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.data.preprocess import PreprocessOptions, preprocess
from megafp8.data.sources import expand_inputs
from megafp8.data.train_tokenizer import train_tokenizer
from megafp8.errors import DataError
from tests.support.limits import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of its own, one behind a link, and what the patterns do not match."""
    lines = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(20))
    for name in ("in/own/a.jsonl", "elsewhere/b.jsonl", "in/c.json", "in/D.JSONL"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(lines)
    (tmp_path / "in/.ipynb_checkpoints").mkdir()
    (tmp_path / "in/.ipynb_checkpoints/a-checkpoint.jsonl").write_text(lines)
    (tmp_path / "in/e.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "in/linked").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "in"


LINE = "read 2 files, left out 4: D.JSONL, c.json, e.jsonl.gz, .ipynb_checkpoints/"


def names(folder: Path, **options) -> list[str]:
    files = expand_inputs([str(folder)], **options).files
    return [file.relative_to(folder).as_posix() for file in files]


def test_a_folder_gives_each_file_once_and_tells_what_it_leaves_out(folder, tmp_path):
    assert names(folder) == ["linked/b.jsonl", "own/a.jsonl"]
    report = preprocess([str(folder)], str(tmp_path / "o"), PreprocessOptions("ByteTokenizer"))
    assert list(report.documents.values()) == [40]
    assert report.lines()[0] == LINE
    trained = train_tokenizer([str(folder)], tmp_path / "t", 300, "bpe")
    assert trained.lines()[0] == LINE


def test_the_tool_prints_the_line(folder, tmp_path):
    command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), "--input", str(folder)]
    command += ["--output-prefix", str(tmp_path / "o"), "--tokenizer-type", "ByteTokenizer"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert LINE in done.stdout.splitlines()


def test_loops_of_links_end_and_a_file_is_read_once(folder):
    (folder / "own/up").symlink_to(folder)
    (folder.parent / "elsewhere/back").symlink_to(folder)
    (folder / "A.jsonl").symlink_to(folder / "own/a.jsonl")  # sorts before what it leads to
    (folder / "z").symlink_to(folder.parent / "elsewhere")
    (folder / "gone.jsonl").symlink_to(folder / "nowhere")
    found = expand_inputs([str(folder)])
    assert names(folder) == ["linked/b.jsonl", "own/a.jsonl"]
    assert {"A.jsonl (read already)", "own/up (read already)", "z (read already)"} <= set(
        found.left_out
    )
    assert {"linked/back (read already)", "gone.jsonl (a broken link)"} <= set(found.left_out)


def test_a_folder_is_resolved_and_not_each_of_its_files(folder, monkeypatch):
    for number in range(50):
        (folder / f"own/{number}.jsonl").write_text("{}\n")
    resolved = []
    real = os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path: resolved.append(path) or real(path))
    assert len(names(folder)) == 52
    assert resolved == [folder, folder / "linked"]


def test_hidden_files_need_a_pattern_of_their_own(folder):
    (folder / "own/.draft.jsonl").write_text("{}\n")
    assert "own/.draft.jsonl" not in names(folder)
    assert names(folder, globs=[".*.jsonl"]) == ["own/.draft.jsonl"]
    hidden = folder / ".ipynb_checkpoints"
    assert names(hidden) == ["a-checkpoint.jsonl"], "a folder that is named is not hidden"


def test_what_is_excluded_by_name_is_no_news(folder):
    found = expand_inputs([str(folder)], exclude=["*.json", "*.gz", ".*", "linked", "D.*"])
    assert found.line() == "read 1 file"


def test_a_folder_without_a_match_says_what_it_holds(folder):
    with pytest.raises(DataError, match=r"no file matches --glob \*\.rs, left out 6: .*D\.JSONL"):
        expand_inputs([str(folder)], globs=["*.rs"])


def test_many_files_are_counted_and_several_folders_told_apart(folder, tmp_path):
    for number in range(20):
        (folder / f"{number:02}.png").touch()
    one = expand_inputs([str(folder)]).line()
    assert "left out 24: D.JSONL, c.json, e.jsonl.gz" in one and one.endswith(" and 16 more")
    two = expand_inputs([str(folder), str(tmp_path / "elsewhere")])
    assert len(two.files) == 3, "inputs are taken as they are given"
    assert str(folder / "c.json") in two.left_out


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_a_closed_folder_is_told(folder):
    (folder / "own").chmod(0)
    try:
        with pytest.raises(DataError, match="own: cannot be read: Permission denied"):
            expand_inputs([str(folder)])
    finally:
        (folder / "own").chmod(0o755)
