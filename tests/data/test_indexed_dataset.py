"""The `.bin`/`.idx` pair: Megatron's bytes, exact round trips, and every damage named at open."""

import shutil
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest

from megafp8.data.indexed_dataset import (
    CODE_OF_DTYPE,
    MAGIC,
    IndexedDataset,
    IndexedDatasetWriter,
    bin_path,
    idx_path,
    optimal_dtype,
)
from megafp8.errors import DataError
from tests.support.corpora import add_document
from tests.support.oracles import need

U16, I32 = np.dtype("<u2"), np.dtype("<i4")

# Written by IndexedDatasetBuilder of megatron-core 0.16.1, one add_document(d, [len(d)]) each.
GOLDEN = {
    "uint16": (
        U16,
        [[1, 2, 3], [4], [], [5, 6, 7, 8, 9], [10, 11]],
        "0100020003000400050006000700080009000a000b00",
        "4d4d49444944580000010000000000000008050000000000000006000000000000000300000001000000"
        "000000000500000002000000000000000000000006000000000000000800000000000000080000000000"
        "000012000000000000000000000000000000010000000000000002000000000000000300000000000000"
        "04000000000000000500000000000000",
    ),
    "int32": (
        I32,
        [[0, 65535, 65536, 119546], [], [7]],
        "00000000ffff000000000100fad2010007000000",
        "4d4d49444944580000010000000000000004030000000000000004000000000000000400000000000000"
        "010000000000000000000000100000000000000010000000000000000000000000000000010000000000"
        "000002000000000000000300000000000000",
    ),
    "no documents": (
        U16,
        [],
        "",
        "4d4d49444944580000010000000000000008000000000000000001000000000000000000000000000000",
    ),
}


def write(prefix: Path, documents, dtype=U16) -> Path:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            add_document(writer, document)
    return prefix


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_are_megatrons(tmp_path, name):
    dtype, documents, bin_hex, idx_hex = GOLDEN[name]
    prefix = write(tmp_path / "d", documents, dtype)
    assert bin_path(prefix).read_bytes().hex() == bin_hex
    assert idx_path(prefix).read_bytes().hex() == idx_hex
    data = IndexedDataset(prefix)
    assert [data[i].tolist() for i in range(len(data))] == documents
    assert data.dtype == dtype
    assert data.num_tokens == sum(map(len, documents))


def test_bytes_equal_megatron_where_it_is_installed(tmp_path):
    need("megatron")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron warns that TE and apex are missing
        from megatron.core.datasets import indexed_dataset as reference
    rng = np.random.default_rng(7)
    for vocab_size in (100, 65499, 65500, 119547):
        documents = [
            rng.integers(0, vocab_size, size).tolist() for size in rng.integers(0, 50, 200)
        ]
        dtype = reference.DType.optimal_dtype(vocab_size)
        assert np.dtype(dtype) == optimal_dtype(vocab_size)
        ours = write(tmp_path / f"ours{vocab_size}", documents, optimal_dtype(vocab_size))
        theirs = tmp_path / f"theirs{vocab_size}"
        builder = reference.IndexedDatasetBuilder(str(bin_path(theirs)), dtype=dtype)
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize(str(idx_path(theirs)))
        assert bin_path(ours).read_bytes() == bin_path(theirs).read_bytes()
        assert idx_path(ours).read_bytes() == idx_path(theirs).read_bytes()
        read = reference.IndexedDataset(str(ours))
        assert [read[i].tolist() for i in range(len(read))] == documents


def test_megatrons_documents_of_several_sequences_are_read(tmp_path):
    # megatron-core 0.16.1: add_document([1..5], [2, 3]); add_item([9]); end_document()
    bin_path(tmp_path / "d").write_bytes(bytes.fromhex("010002000300040005000900"))
    idx_path(tmp_path / "d").write_bytes(
        bytes.fromhex(
            "4d4d4944494458000001000000000000000803000000000000000300000000000000020000000300000001"
            "000000000000000000000004000000000000000a0000000000000000000000000000000200000000000000"
            "0300000000000000"
        )
    )
    data = IndexedDataset(tmp_path / "d")
    assert [data[i].tolist() for i in range(3)] == [[1, 2], [3, 4, 5], [9]]
    assert data.document_indices.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(65499, "uint16"), (65500, "int32"), (65536, "int32"), (65537, "int32"), (119547, "int32")],
)
def test_ids_survive_for_every_vocabulary_size(tmp_path, vocab_size, dtype):
    ids = [i for i in (0, 65498, 65499, 65535, 65536, 119546) if i < vocab_size]
    data = IndexedDataset(write(tmp_path / "d", [ids], optimal_dtype(vocab_size)))
    assert data.dtype.name == dtype
    assert data[0].tolist() == ids


def test_uint16_holds_65535(tmp_path):
    assert IndexedDataset(write(tmp_path / "d", [[0, 65535]]))[0].tolist() == [0, 65535]


@pytest.mark.parametrize("token", [65536, 119546, -1])
def test_an_id_that_does_not_fit_is_an_error_and_leaves_nothing(tmp_path, token):
    with pytest.raises(DataError, match=rf"token id {token} does not fit uint16 \(0\.\.65535\)"):
        write(tmp_path / "d", [[1], [2, token]])
    assert list(tmp_path.iterdir()) == []


def test_float_datasets_are_refused(tmp_path):
    with pytest.raises(DataError, match="float32"):
        IndexedDatasetWriter(tmp_path / "d", np.float32)


def test_views_and_positions(tmp_path):
    data = IndexedDataset(write(tmp_path / "d", [[], [1, 2, 3], [], [], [4], []]))
    assert data.tokens(1, 4).tolist() == [2, 3, 4]
    assert [data.sequence_at(token) for token in range(4)] == [1, 1, 1, 4]
    assert [data.sequence_start(i) for i in range(7)] == [0, 0, 3, 3, 3, 4, 4]
    with pytest.raises(ValueError, match="read-only"):
        data[1][0] = 9
    with pytest.raises(IndexError):
        data[6]


def good_pair(tmp_path) -> Path:
    return write(tmp_path / "d", [[1, 2, 3], [4], [5, 6, 7, 8, 9]])


def edit(path: Path, offset: int, new: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(new)] = new
    path.write_bytes(content)


def damage_both_empty(prefix):
    bin_path(prefix).write_bytes(b"")
    idx_path(prefix).write_bytes(b"")


def damage_other_index(documents):
    def apply(prefix):
        other = write(prefix.with_name("other"), documents)
        shutil.move(idx_path(other), idx_path(prefix))

    return apply


DAMAGE = {
    "bin cut by 1 byte": (
        lambda p: bin_path(p).write_bytes(bin_path(p).read_bytes()[:-1]),
        r"d\.bin: 17 bytes, but d\.idx describes 18 \(9 uint16 tokens in 3 sequences\)",
    ),
    "bin cut to half": (
        lambda p: bin_path(p).write_bytes(bin_path(p).read_bytes()[:9]),
        r"d\.bin: 9 bytes, but d\.idx describes 18",
    ),
    "bin longer": (
        lambda p: bin_path(p).write_bytes(bin_path(p).read_bytes() + b"\0\0"),
        r"d\.bin: 20 bytes, but d\.idx describes 18",
    ),
    "idx cut by 8 bytes": (
        lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes()[:-8]),
        r"d\.idx: 94 bytes, expected 102 for 3 sequences and 4 document entries",
    ),
    "idx longer": (
        lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes() + b"\0\0\0"),
        r"d\.idx: 105 bytes, expected 102 .* \(multimodal datasets cannot be read\)",
    ),
    "idx cut inside the header": (
        lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes()[:20]),
        r"d\.idx: 20 bytes, expected at least 34",
    ),
    "other magic": (
        lambda p: edit(idx_path(p), 0, b"TNTIDX\0\0\0"),
        r"d\.idx: magic b'TNTIDX.*expected b'MMIDIDX",
    ),
    "version 2": (
        lambda p: edit(idx_path(p), 9, struct.pack("<Q", 2)),
        r"d\.idx: version 2, expected 1",
    ),
    "dtype code 99": (
        lambda p: edit(idx_path(p), 17, b"\x63"),
        r"d\.idx: dtype code 99, expected one of .*8 uint16",
    ),
    "float32 dtype": (lambda p: edit(idx_path(p), 17, b"\x07"), r"dtype code 7, expected one of"),
    "int32 dtype over uint16 tokens": (lambda p: edit(idx_path(p), 17, b"\x04"), "damaged index"),
    "index of a longer data set": (
        damage_other_index([[1, 2, 3], [4], [5, 6, 7, 8, 9], [10]]),
        r"d\.bin: 18 bytes, but d\.idx describes 20",
    ),
    "index of a shorter data set": (
        damage_other_index([[1, 2, 3], [4]]),
        r"d\.bin: 18 bytes, but d\.idx describes 8",
    ),
    "idx missing": (lambda p: idx_path(p).unlink(), r"d\.idx: cannot be opened: No such file"),
    "bin missing": (lambda p: bin_path(p).unlink(), r"d\.bin: cannot be opened: No such file"),
    "both empty": (damage_both_empty, r"d\.idx: 0 bytes, expected at least 34"),
    "count beyond the file": (
        lambda p: edit(idx_path(p), 18, struct.pack("<Q", 1 << 62)),
        r"d\.idx: 102 bytes, expected \d+ for 4611686018427387904 sequences",
    ),
    "negative length": (
        lambda p: edit(idx_path(p), 38, struct.pack("<i", -1)),
        r"sequence 1 has length -1 .*damaged index",
    ),
    "wrong pointer": (
        lambda p: edit(idx_path(p), 46 + 8, struct.pack("<q", 4)),
        r"sequence 1 has length 1 and byte offset 4, expected offset 6: damaged index",
    ),
    "document index falls": (
        lambda p: edit(idx_path(p), 70 + 8, struct.pack("<q", 3)),
        r"document index is 0\.\.3, expected to rise from 0 to 3",
    ),
    "document index ends early": (
        lambda p: edit(idx_path(p), 70 + 24, struct.pack("<q", 2)),
        r"document index is 0\.\.2, expected to rise from 0 to 3",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_at_open(tmp_path, name):
    apply, message = DAMAGE[name]
    prefix = good_pair(tmp_path)
    assert len(IndexedDataset(prefix)) == 3
    apply(prefix)
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_path_with_suffix_is_refused_with_the_right_one(tmp_path, suffix):
    prefix = good_pair(tmp_path)
    with pytest.raises(DataError, match=rf"give the path without '\{suffix}': .*/d$"):
        IndexedDataset(f"{prefix}{suffix}")


def test_text_instead_of_a_corpus_is_told(tmp_path):
    (tmp_path / "in.jsonl").write_text("{}")
    with pytest.raises(
        DataError, match=r"in\.jsonl is a file of its own, encode it with tools/pre"
    ):
        IndexedDataset(tmp_path / "in.jsonl")


def test_damage_in_a_later_check_block_is_found(tmp_path, monkeypatch):
    prefix = write(tmp_path / "d", [[1]] * 10)
    monkeypatch.setattr("megafp8.data.indexed_dataset._CHECK_BLOCK", 4)
    assert IndexedDataset(prefix).num_tokens == 10
    edit(idx_path(prefix), 34 + 4 * 9, struct.pack("<i", 2))
    with pytest.raises(DataError, match="18|20|22"):
        IndexedDataset(prefix)


def test_final_names_appear_only_on_commit(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", U16) as writer:
        add_document(writer, [1, 2])
        writer.prepare()
        assert not bin_path(tmp_path / "d").exists() and not idx_path(tmp_path / "d").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_a_failed_rewrite_keeps_the_old_pair(tmp_path):
    prefix = good_pair(tmp_path)
    before = bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()
    with pytest.raises(RuntimeError, match="stopped"), IndexedDatasetWriter(prefix, U16) as writer:
        add_document(writer, [7] * 100)
        raise RuntimeError("stopped")
    assert (bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()) == before
    assert len(list(tmp_path.iterdir())) == 2


def test_what_was_lost_on_the_way_to_disk_is_noticed(tmp_path):
    writer = IndexedDatasetWriter(tmp_path / "d", U16)
    add_document(writer, [1, 2, 3])
    writer.num_tokens += 1
    with pytest.raises(DataError, match="read back 1 documents and 3 tokens, wrote 1 and 4"):
        writer.commit()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write there: .*file is a file, not a folder"):
        IndexedDatasetWriter(tmp_path / "file" / "d", U16)


def test_codes_are_megatrons():
    assert {dtype.name: code for dtype, code in CODE_OF_DTYPE.items()} == {
        "uint8": 1,
        "int8": 2,
        "int16": 3,
        "int32": 4,
        "int64": 5,
        "uint16": 8,
    }
    assert len(MAGIC) == 9
