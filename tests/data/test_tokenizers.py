"""Tokenizers: exact round trips, one end-of-document id, errors in one line."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megafp8.data.tokenizers import (
    EOD_TEXT,
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    build_tokenizer,
    resolve_vocab_size,
)
from megafp8.data.train_tokenizer import train_tokenizer
from megafp8.errors import DataError

ROOT = Path(__file__).resolve().parents[2]

TEXTS = [
    "def f(x):\n\n\treturn {x: [1,  2]}   # two  spaces\r\n",
    "  leading and trailing   ",
    " ",
    "\n",
    "",
    "caf\u00e9 e\u0301 \u65e5\u672c\u8a9e \U0001f600 \u00a0 \u3000 \ufeff",
    "\u2581 a\u2581\u2581b \u2581",  # the character that SentencePiece uses for a space
    "\u2585 \u2047 \x00\x01\x7f",
    f"<unk> <s> </s> {EOD_TEXT} <0x0A>",
    "\ufb01 \u00bd \uff21 \u212b",  # characters that NFKC would replace
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Two small files of code, with a Japanese line that stays outside the vocabulary."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = "\n".join(
        f"def function_{i % 17}(argument, other={i}):\n    return [argument + {i}, other]\n"
        for i in range(400)
    )
    (folder / "a.py").write_text(lines)
    (folder / "b.txt").write_text("plain words, plain words and more words\n" * 50 + "\u65e5")
    return folder


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory) -> dict[str, Path]:
    output = tmp_path_factory.mktemp("trained")
    for kind in ("sentencepiece", "bpe"):
        train_tokenizer([str(corpus)], output / kind, 400, kind, globs=["*.py", "*.txt"])
    return {kind: output / kind for kind in ("sentencepiece", "bpe")}


@pytest.fixture(scope="module")
def tokenizers(trained):
    return {
        "byte": ByteTokenizer(),
        "sentencepiece": SentencePieceTokenizer(trained["sentencepiece"]),
        "bpe": HuggingFaceTokenizer(trained["bpe"]),
    }


@pytest.mark.parametrize("name", ["byte", "sentencepiece", "bpe"])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_every_text_comes_back(tokenizers, name, text):
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    # Text must not be able to end a document.
    assert tokenizer.eod not in ids


@pytest.mark.parametrize("name", ["byte", "sentencepiece", "bpe"])
def test_the_end_of_a_document_is_shown(tokenizers, name):
    tokenizer = tokenizers[name]
    ids = [*tokenizer.encode("a  b"), tokenizer.eod, *tokenizer.encode(" c"), tokenizer.eod]
    assert tokenizer.decode(ids) == f"a  b{EOD_TEXT} c{EOD_TEXT}"


@pytest.mark.parametrize("name", ["byte", "sentencepiece", "bpe"])
def test_a_lone_surrogate_is_no_text(tokenizers, name):
    with pytest.raises(UnicodeEncodeError):
        tokenizers[name].encode("a\ud800b")


def test_byte_tokenizer_ids():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("A\u00e9") == [65, 0xC3, 0xA9]
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_null_tokenizer_is_megatrons():
    tokenizer = NullTokenizer(100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode("5 0  99\n7") == [5, 0, 99, 7]
    assert tokenizer.decode([5, 0, 100]) == "5 0 100"


@pytest.mark.parametrize("word", ["100", "-1", "x", "1.0", "\u0661"])
def test_null_tokenizer_refuses_other_words(word):
    with pytest.raises(DataError, match=r"is not an id in 0\.\.99"):
        NullTokenizer(100).encode(f"5 {word}")


def test_trained_sizes_and_compression(tokenizers, corpus):
    text = (corpus / "a.py").read_text()
    for name in ("sentencepiece", "bpe"):
        assert tokenizers[name].vocab_size == 400
        assert len(tokenizers[name].encode(text)) < len(text) / 3
    assert tokenizers["sentencepiece"].eod == 1
    assert tokenizers["bpe"].eod == 0


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe"])
def test_training_is_deterministic_across_processes(trained, corpus, tmp_path, kind):
    command = [sys.executable, str(ROOT / "tools/train_tokenizer.py"), "--input", str(corpus)]
    command += ["--glob", "*.py", "*.txt", "--output", str(tmp_path), "--vocab-size", "400"]
    done = subprocess.run([*command, "--type", kind], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "400 ids" in done.stdout
    [made] = tmp_path.iterdir()
    assert made.read_bytes() == (trained[kind] / made.name).read_bytes()


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe"])
def test_a_small_corpus_gives_a_smaller_tokenizer(tmp_path, kind):
    (tmp_path / "a.txt").write_text("ab ab ab\n")
    report = train_tokenizer([str(tmp_path / "a.txt")], tmp_path, 5000, kind)
    assert 257 <= report.vocab_size < 300


def test_sampling_bounds_the_text_and_covers_all_files(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"word{number} " * 20_000)
    report = train_tokenizer([str(tmp_path)], tmp_path / "t", 300, "bpe", max_bytes=200_000)
    assert 190_000 <= report.text_bytes <= 210_000
    tokenizer = HuggingFaceTokenizer(tmp_path / "t")
    assert len(tokenizer.encode("word9 word9")) <= 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 257}, "--vocab-size 257: expected at least 258"),
        ({"inputs": ["nowhere"]}, "--input nowhere: no such file or folder"),
        ({"globs": ["*.rs"]}, r"no file matches --glob \*\.rs"),
    ],
)
def test_training_errors(corpus, tmp_path, changes, message):
    arguments = {"inputs": [str(corpus)], "output": tmp_path, "vocab_size": 300, "kind": "bpe"}
    with pytest.raises(DataError, match=message):
        train_tokenizer(**{**arguments, **changes})


def test_training_on_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="no text to train on in 1 files"):
        train_tokenizer([str(tmp_path / "a.txt")], tmp_path / "t", 300, "bpe")
    assert not (tmp_path / "t").exists()


def test_training_stops_at_a_file_that_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8: byte 0xE9 at offset 3 of the file"):
        train_tokenizer([str(tmp_path)], tmp_path / "t", 300, "bpe")


def section(kind, model=None, vocab_size=None):
    return SimpleNamespace(tokenizer_type=kind, tokenizer_model=model, vocab_size=vocab_size)


def test_build_takes_a_folder_or_a_file(trained):
    for kind, name in (
        ("SentencePieceTokenizer", "sentencepiece"),
        ("HuggingFaceTokenizer", "bpe"),
    ):
        folder = trained[name]
        [file] = folder.iterdir()
        for model in (str(folder), str(file)):
            built = build_tokenizer(section(kind, model))
            assert built is not None and built.vocab_size == 400


def test_an_empty_file_is_no_sentencepiece_model(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(DataError, match="not a SentencePiece model .the file is empty"):
        build_tokenizer(section("SentencePieceTokenizer", str(tmp_path)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (section("SentencePieceTokenizer"), "needs --tokenizer-model"),
        (section("SentencePieceTokenizer", "/nowhere/x"), "--tokenizer-model /nowhere/x: no such"),
        (section("HuggingFaceTokenizer", str(ROOT / "tests")), r"holds no tokenizer\.json"),
        (section("HuggingFaceTokenizer", __file__), r"not a tokenizer\.json"),
        (section("SentencePieceTokenizer", __file__), "not a SentencePiece model"),
        (section("NullTokenizer"), "NullTokenizer needs --vocab-size"),
    ],
)
def test_build_errors_are_one_line(data, message):
    with pytest.raises(DataError, match=message) as caught:
        build_tokenizer(data)
    assert "\n" not in str(caught.value)


def test_vocabulary_size():
    assert resolve_vocab_size(section("ByteTokenizer")) == 257
    assert resolve_vocab_size(section("ByteTokenizer", vocab_size=257)) == 257
    assert resolve_vocab_size(section("ByteTokenizer", vocab_size=300)) == 300
    assert resolve_vocab_size(section("NullTokenizer", vocab_size=100)) == 101
    assert resolve_vocab_size(section(None, vocab_size=100)) == 100
    with pytest.raises(DataError, match="the tokenizer's 257 ids; give --vocab-size 257 or more"):
        resolve_vocab_size(section("ByteTokenizer", vocab_size=256))
    with pytest.raises(DataError, match="give --tokenizer-type or --vocab-size"):
        resolve_vocab_size(section(None))


def test_eod_named_beside_the_tokenizer_wins(trained, tmp_path):
    content = json.loads((trained["bpe"] / "tokenizer.json").read_text())
    added = {**content["added_tokens"][0], "id": 500, "content": "<end>"}
    content["added_tokens"].append(added)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    # Added tokens count, and a gap in the ids needs room: the largest id is what matters.
    with_gap = HuggingFaceTokenizer(tmp_path)
    assert with_gap.vocab_size == 1 + max(with_gap._tokenizer.get_vocab().values()) > 400
    assert with_gap.eod == 0
    for eos in ("<end>", {"content": "<end>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert HuggingFaceTokenizer(tmp_path).eod == with_gap.vocab_size - 1


def test_a_tokenizer_without_end_of_document_is_refused(trained, tmp_path):
    content = json.loads((trained["bpe"] / "tokenizer.json").read_text())
    content["added_tokens"] = []
    content["model"]["vocab"]["<other>"] = content["model"]["vocab"].pop(EOD_TEXT)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="no end-of-document token"):
        HuggingFaceTokenizer(tmp_path)
