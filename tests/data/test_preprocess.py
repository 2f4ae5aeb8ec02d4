"""Preprocessing: degenerate and bad records, identical bytes for any number of workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.data.preprocess import PreprocessOptions, preprocess
from megafp8.errors import DataError
from tests.support.limits import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/preprocess_data.py"
BYTES = PreprocessOptions("ByteTokenizer")
EOD = PreprocessOptions("ByteTokenizer", append_eod=True)
SKIP = PreprocessOptions("ByteTokenizer", skip_bad_records=True)

BAD_LINES = [
    b'{"text": "ok"}',
    b'{"txt": "x"}',
    b'{"text": null}',
    b'{"text": 5}',
    b'{"text": "caf\xe6A"}',
    b'{"text": "a\\ud800b"}',
    b'{"text": "ok',
    b'{"text": "ok"}',
]


def jsonl(path: Path, texts) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def documents(prefix) -> list[list[int]]:
    data = IndexedDataset(f"{prefix}_text_document")
    return [data[i].tolist() for i in range(len(data))]


def run_tool(*arguments, timeout=PATIENCE_S) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2), (3, 2, 1, 0)])
def test_empty_records_make_no_document_wherever_they_stand(tmp_path, order):
    texts = ["", "x" * 20, " \n\t ", "y"]
    source = jsonl(tmp_path / "in.jsonl", [texts[i] for i in order])
    report = preprocess([source], str(tmp_path / "out"), EOD)
    kept = [[*texts[i].encode(), 256] for i in order if texts[i].strip()]
    assert documents(tmp_path / "out") == kept
    assert report.empty == 2
    assert IndexedDataset(tmp_path / "out_text_document").document_indices.tolist() == [0, 1, 2]


def test_without_append_eod_nothing_is_added(tmp_path):
    preprocess([jsonl(tmp_path / "in.jsonl", ["ab", "c"])], str(tmp_path / "out"), BYTES)
    assert documents(tmp_path / "out") == [[97, 98], [99]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (2, r"in\.jsonl:2: key 'text' is missing; keys found: 'txt'"),
        (3, r"in\.jsonl:2: key 'text': expected a string, found null"),
        (4, r"in\.jsonl:2: key 'text': expected a string, found a number"),
        (5, r"in\.jsonl:2: not UTF-8: byte 0xE6 at offset 13 of the line"),
        (6, r"in\.jsonl:2: key 'text': lone surrogate U\+D800 at character 1"),
        (7, r"in\.jsonl:2: broken JSON: Unterminated string starting at character 9"),
    ],
)
def test_each_bad_record_stops_with_file_line_and_reason(tmp_path, line, message):
    (tmp_path / "in.jsonl").write_bytes(BAD_LINES[0] + b"\n" + BAD_LINES[line - 1] + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), BYTES)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    "line",
    [b"[1]", b'"text"', b"5", b"null", b"\xff"],
)
def test_other_lines_that_are_no_records(tmp_path, line):
    (tmp_path / "in.jsonl").write_bytes(line)
    with pytest.raises(DataError, match=r"in\.jsonl:1: "):
        preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), BYTES)


@pytest.mark.parametrize("start", [b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh9"])
def test_compressed_files_are_told(tmp_path, start):
    for name in ("in.jsonl", "in.jsonl.gz"):
        (tmp_path / name).write_bytes(start + b"\xff\xfe")
        with pytest.raises(DataError, match="it is compressed .*, unpack it first"):
            preprocess([str(tmp_path / name)], str(tmp_path / "out"), BYTES)


@pytest.mark.parametrize("workers", [1, 2])
def test_tool_stops_at_the_first_bad_record(tmp_path, workers):
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(BAD_LINES))
    arguments = ["--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out"]
    arguments += ["--tokenizer-type", "ByteTokenizer", "--workers", workers, "--append-eod"]
    done = run_tool(*arguments, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}/in.jsonl:2: key 'text' is missing")
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]

    done = run_tool(*arguments, "--skip-bad-records", timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "2 documents, 6 tokens, uint16" in done.stdout
    assert (
        "skipped 0 empty and 6 bad records (1 broken JSON, 1 invalid UTF-8, 1 lone surrogate, "
        "1 missing key, 2 wrong type)" in done.stdout
    )
    assert documents(tmp_path / "out") == [[*b"ok", 256]] * 2


def test_output_does_not_depend_on_the_workers(tmp_path, monkeypatch):
    monkeypatch.setattr("megafp8.data.preprocess._BATCH_RECORDS", 7)
    texts = [f"{'word ' * (i % 40)}{i}" if i % 11 else "" for i in range(500)]
    source = jsonl(tmp_path / "in.jsonl", texts)
    reports = [
        preprocess([source], str(tmp_path / f"out{workers}"), EOD, workers=workers)
        for workers in (1, 2, 3)
    ]
    for suffix in ("bin", "idx"):
        made = [(tmp_path / f"out{w}_text_document.{suffix}").read_bytes() for w in (1, 2, 3)]
        assert made[0] == made[1] == made[2]
    assert [report.empty for report in reports] == [46] * 3
    assert documents(tmp_path / "out1") == [[*text.encode(), 256] for text in texts if text]


def test_bad_record_deep_in_a_pool_is_the_first_by_order(tmp_path, monkeypatch):
    monkeypatch.setattr("megafp8.data.preprocess._BATCH_RECORDS", 3)
    lines = [b'{"text": "ok"}'] * 100
    lines[40] = lines[90] = b"broken"
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=r"in\.jsonl:41: broken JSON"):
        preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), BYTES, workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_text_files_and_folders(tmp_path):
    folder = tmp_path / "tree"
    for name, content in {
        "b.py": b"bb\r\n",
        "a/z.py": b"\xef\xbb\xbfa",
        "a/skip/x.py": b"x",
        "c.md": b"c",
        "empty.py": b"",
        "bad.py": b"# caf\xe9",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    arguments = {"globs": ["*.py"], "exclude": ["skip"]}
    with pytest.raises(DataError, match=r"bad\.py: not UTF-8: byte 0xE9 at offset 5 of the file"):
        preprocess([str(folder)], str(tmp_path / "out"), BYTES, **arguments)
    report = preprocess([str(folder)], str(tmp_path / "out"), SKIP, **arguments)
    assert documents(tmp_path / "out") == [[97], [98, 98, 13, 10]]
    assert (report.empty, dict(report.bad)) == (1, {"invalid UTF-8": 1})
    with pytest.raises(DataError, match=r"tree: no file matches --glob \*\.rs"):
        preprocess([str(folder)], str(tmp_path / "out"), BYTES, globs=["*.rs"])


def test_each_key_gives_a_dataset(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a", "title": "T"}\n{"text": "b", "title": ""}\n')
    options = PreprocessOptions("ByteTokenizer", json_keys=("text", "title"))
    report = preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), options)
    assert documents(tmp_path / "out") == [[97], [98]]
    assert IndexedDataset(tmp_path / "out_title_document")[0].tolist() == [84]
    assert list(report.documents.values()) == [2, 1]


def test_null_tokenizer_words_that_are_no_ids_are_bad_records(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", ["5 6", "5 100", "7"])
    options = PreprocessOptions("NullTokenizer", vocab_size=100, append_eod=True)
    with pytest.raises(DataError, match=r"in\.jsonl:2: NullTokenizer: '100' is not an id"):
        preprocess([source], str(tmp_path / "out"), options)
    options = PreprocessOptions(
        "NullTokenizer", vocab_size=100, append_eod=True, skip_bad_records=True
    )
    preprocess([source], str(tmp_path / "out"), options)
    assert documents(tmp_path / "out") == [[5, 6, 100], [7, 100]]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65498, "uint16"), (65499, "int32"), (119546, "int32")]
)
def test_width_counts_the_end_of_document_id(tmp_path, vocab_size, dtype):
    source = jsonl(tmp_path / "in.jsonl", [f"0 {vocab_size - 1}"])
    options = PreprocessOptions("NullTokenizer", vocab_size=vocab_size, append_eod=True)
    preprocess([source], str(tmp_path / "out"), options)
    assert IndexedDataset(tmp_path / "out_text_document").dtype.name == dtype
    assert documents(tmp_path / "out") == [[0, vocab_size - 1, vocab_size]]


def test_a_byte_order_mark_and_blank_lines_do_no_harm(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}')
    report = preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), BYTES)
    assert documents(tmp_path / "out") == [[97], [98]]
    assert report.empty == 1


def test_nothing_to_write_is_an_error_and_keeps_an_old_pair(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", ["old"])
    preprocess([source], str(tmp_path / "out"), BYTES)
    jsonl(tmp_path / "in.jsonl", ["", " "])
    with pytest.raises(DataError, match="no documents to write: 2 empty and 0 bad records"):
        preprocess([source], str(tmp_path / "out"), BYTES)
    assert documents(tmp_path / "out") == [[*b"old"]]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_dead_worker_ends_the_work(tmp_path, monkeypatch):
    """A worker killed for memory must not leave the parent waiting for ever."""
    monkeypatch.setattr("megafp8.data.preprocess._encode_batch", _die)
    source = jsonl(tmp_path / "in.jsonl", ["a"])
    with pytest.raises(DataError, match="a worker process was killed"):
        preprocess([source], str(tmp_path / "out"), BYTES, workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def _die(records, options, count):
    os._exit(9)


def test_tool_usage_errors_are_one_line():
    for arguments, message in (
        ([], "the following arguments are required"),
        (["--input", "nowhere", "--output-prefix", "x"], "--tokenizer-type"),
        (
            ["--input", "nowhere", "--output-prefix", "/x", "--tokenizer-type", "ByteTokenizer"],
            "error: --input nowhere: no such file or folder",
        ),
    ):
        done = run_tool(*arguments)
        assert done.returncode == 2
        assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_keys_are_checked(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", ["a"])
    options = PreprocessOptions("ByteTokenizer", json_keys=("text", "text"))
    with pytest.raises(DataError, match="--json-keys text text: expected distinct keys"):
        preprocess([source], str(tmp_path / "out"), options)
