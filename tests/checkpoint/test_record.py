import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megafp8.checkpoint import FORMAT_VERSION, CheckpointRecord, FileEntry, TensorEntry
from megafp8.errors import CheckpointError

PATH = Path("somewhere/megafp8.json")

# As version 1 wrote it. Later versions must go on reading this text.
STORED_V1 = """{
 "format_version": 1, "iteration": 10,
 "config": {"model": {"num_layers": 4}}, "layout": {"tp": 2, "fsdp": 2},
 "data_position": {"consumed_samples": 80}, "manifest_sha256": "ab12", "state": {"lr": 0.001},
 "tensors": {"a.weight": {"shape": [2, 3], "dtype": "float32"}},
 "files": {"__0_0.distcp": {"size": 12, "crc32": "00c0ffee"}}
}"""


# The same as version 2 wrote it: with the sum of its content.
STORED_V2 = STORED_V1.replace(
    '"format_version": 1', '"format_version": 2, "content_crc32": "1fea4630"'
)


def stored(**changes: Any) -> str:
    return json.dumps({**json.loads(STORED_V1), **changes})


def test_reads_version_1() -> None:
    assert CheckpointRecord.from_json(STORED_V1, PATH) == CheckpointRecord(
        iteration=10,
        config={"model": {"num_layers": 4}},
        layout={"tp": 2, "fsdp": 2},
        data_position={"consumed_samples": 80},
        manifest_sha256="ab12",
        state={"lr": 0.001},
        tensors={"a.weight": TensorEntry(shape=(2, 3), dtype="float32")},
        files={"__0_0.distcp": FileEntry(size=12, crc32="00c0ffee")},
        format_version=1,
    )


def test_reads_version_2() -> None:
    first = CheckpointRecord.from_json(STORED_V1, PATH)
    second = CheckpointRecord.from_json(STORED_V2, PATH)
    assert second == dataclasses.replace(first, format_version=2)


def test_an_older_record_is_written_in_the_newest_form() -> None:
    record = CheckpointRecord.from_json(STORED_V1, PATH)
    again = CheckpointRecord.from_json(record.to_json(), PATH)
    assert again == dataclasses.replace(record, format_version=FORMAT_VERSION)
    assert CheckpointRecord.from_json(again.to_json(), PATH) == again
    assert list(json.loads(record.to_json()))[0] == "format_version"


def test_no_bit_can_be_flipped_unseen() -> None:
    """In any byte of the file: an error that names it, or a record that says the same."""
    record = CheckpointRecord.from_json(STORED_V1, PATH)
    content = record.to_json().encode()
    whole = CheckpointRecord.from_json(content.decode(), PATH)
    refused = harmless = 0
    for position in range(len(content)):
        for bit in range(7):  # the eighth makes it no UTF-8, which is refused before
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            try:
                assert CheckpointRecord.from_json(damaged.decode(), PATH) == whole, damaged
            except CheckpointError as error:
                assert str(PATH) in str(error)
                refused += 1
            else:
                harmless += 1
    assert harmless < 0.1 * refused  # spaces, and the case of an exponent


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("00c0ffee", "00c0ffef"),
        ('"iteration": 10', '"iteration": 11'),
        ('"consumed_samples": 80', '"consumed_samples": 81'),
        ("ab12", "ab13"),
        ('"lr": 0.001', '"lr": 0.002'),
        ('"num_layers": 4', '"num_layers": 5'),
        ('"tp": 2', '"tp": 3'),
    ],
)
def test_damage_that_is_still_a_record_is_found(old: str, new: str) -> None:
    text = CheckpointRecord.from_json(STORED_V1, PATH).to_json()
    assert text.count(old) == 1
    with pytest.raises(CheckpointError, match="is damaged: crc32 of its content .*, expected"):
        CheckpointRecord.from_json(text.replace(old, new), PATH)


def test_a_record_without_its_checksum_is_refused() -> None:
    content = json.loads(CheckpointRecord.from_json(STORED_V1, PATH).to_json())
    del content["content_crc32"]
    with pytest.raises(CheckpointError, match="is damaged: content_crc32 is missing"):
        CheckpointRecord.from_json(json.dumps(content), PATH)
    # Laid out otherwise it is the same record.
    content = json.loads(CheckpointRecord.from_json(STORED_V1, PATH).to_json())
    CheckpointRecord.from_json(json.dumps(dict(reversed(content.items()))), PATH)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (stored(format_version=FORMAT_VERSION + 1), "format_version is 3, .* reads up to 2"),
        (stored(format_version=0), "format_version is 0"),
        (stored(format_version="1"), "format_version is '1'"),
        (stored(format_version=True), "format_version is True"),
        (stored(colour="red"), r"unknown: \['colour'\]"),
        (stored(iteration=-1), "iteration is -1, expected int"),
        (stored(iteration="10"), "iteration is '10', expected int"),
        (stored(config=[]), r"config is \[\], expected dict"),
        (stored(manifest_sha256=3), "manifest_sha256 is 3, expected str or NoneType"),
        (stored(tensors={"a": {"shape": [-1], "dtype": "float32"}}), r"tensors\['a'\]"),
        (stored(tensors={"a": {"shape": [1]}}), r"tensors\['a'\]"),
        (stored(files={"x": {"size": 1}}), r"files\['x'\]"),
        (stored(files={"../x": {"size": 1, "crc32": ""}}), "'../x', which lies outside"),
        (stored(files={"/etc/passwd": {"size": 1, "crc32": ""}}), "lies outside"),
        (stored(files={"..": {"size": 1, "crc32": ""}}), "lies outside"),
        (stored(iteration=10**30), "iteration is 1000000"),
        (stored(data_position={"consumed_samples": "abc"}), "consumed_samples is 'abc'"),
        (stored(data_position={"consumed_samples": -8}), "consumed_samples is -8"),
        (stored(data_position={"consumed_samples": 16.5}), "consumed_samples is 16.5"),
        (stored(data_position={"consumed_samples": [1]}), r"consumed_samples is \[1\]"),
        (stored(data_position={"consumed_samples": float("nan")}), "NaN is no number of JSON"),
        (stored(state={"skipped_iterations": "x"}), "skipped_iterations is 'x'"),
        (stored(state={"nan_iterations": [2]}), r"nan_iterations is \[2\]"),
        (stored(state={"vocab_size": -1}), "vocab_size is -1"),
        (stored(state={"loss_scaler": {"scale": "x"}}), "loss_scaler is .*expected numbers"),
        (stored(state={"fingerprint": [1]}), r"fingerprint is \[1\], expected what corpora"),
        (stored(state={"fingerprint": {"corpora": {}}}), "fingerprint is .* expected what corpora"),
        (
            stored(state={"fingerprint": {"corpora": {"data_path": {"path": "a"}}, "files": {}}}),
            "fingerprint is .* expected what corpora",
        ),
        (stored(tensors={"a": {"shape": [2**40, 2**40], "dtype": "int8"}}), r"tensors\['a'\]"),
        (stored(files={"a\0b": {"size": 1, "crc32": ""}}), "is no name"),
        (stored(files={"a" * 300: {"size": 1, "crc32": ""}}), "is no name"),
        ("[1]", "holds list, expected an object"),
        (STORED_V1[:40], "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        CheckpointRecord.from_json(text, PATH)
    assert str(PATH) in str(raised.value) and "\n" not in str(raised.value)


def test_missing_field_is_named() -> None:
    content = json.loads(STORED_V1)
    del content["data_position"]
    with pytest.raises(CheckpointError, match=r"missing: \['data_position'\]"):
        CheckpointRecord.from_json(json.dumps(content), PATH)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_values_without_a_json_form_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="iteration 3 has no JSON form"):
        CheckpointRecord(iteration=3, state={"value": value}).to_json()
