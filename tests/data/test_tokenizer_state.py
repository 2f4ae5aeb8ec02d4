"""Ids are those of the text, whatever else a tokenizer's files hold."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers as library
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.data.preprocess import PreprocessOptions, PreprocessReport, preprocess
from megafp8.data.tokenizers import (
    EOD_TEXT,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    lost_characters,
)
from megafp8.data.train_tokenizer import train_tokenizer
from megafp8.errors import DataError
from tests.support.limits import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PROSE = [f"The quick brown fox {i} jumps over the lazy dog, and again. " * 3 for i in range(20)]
ENDS = f"one {EOD_TEXT} two"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A folder with a trained byte-level BPE and the corpus it was trained on."""
    folder = tmp_path_factory.mktemp("plain")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in PROSE)
    (folder / "d.jsonl").write_text(lines)
    train_tokenizer([str(folder / "d.jsonl")], folder, 320, "bpe")
    return folder


def variant(plain: Path, folder: Path, change: Callable[[dict], object]) -> Path:
    content = json.loads((plain / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def saved(tokenizer: library.Tokenizer, folder: Path) -> HuggingFaceTokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(folder)


def encode(source: Path, model: Path, prefix: Path, kind="HuggingFaceTokenizer") -> bytes:
    preprocess([str(source)], str(prefix), PreprocessOptions(kind, str(model), append_eod=True))
    return Path(f"{prefix}_text_document.bin").read_bytes()


TRUNCATION = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 5,
    "pad_type_id": 0,
    "pad_token": "x",
}
STATE = {
    "truncation (max_length 16)": lambda j: j.update(truncation=TRUNCATION),
    "padding": lambda j: j.update(padding=PADDING),
    "model.dropout 0.5": lambda j: j["model"].update(dropout=0.5),
}


@pytest.mark.parametrize("name", STATE)
def test_state_of_other_libraries_is_off_and_told(plain, tmp_path, name):
    folder = variant(plain, tmp_path, STATE[name])
    tokenizer, reference = HuggingFaceTokenizer(folder), HuggingFaceTokenizer(plain)
    for text in (*PROSE, "fox"):
        assert tokenizer.encode(text) == reference.encode(text)
    assert tokenizer.notes == (
        f"{folder / 'tokenizer.json'}: switched off, since ids are those of the text: {name}",
    )
    assert reference.notes == ()
    corpus = encode(plain / "d.jsonl", folder, tmp_path / "a")
    assert corpus == encode(plain / "d.jsonl", plain, tmp_path / "b")


def test_the_tool_tells_all_of_it_once_for_any_number_of_workers(plain, tmp_path):
    folder = variant(plain, tmp_path, lambda j: [change(j) for change in STATE.values()])
    command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), "--append-eod"]
    command += ["--input", str(plain / "d.jsonl"), "--output-prefix", str(tmp_path / "o")]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    done = subprocess.run(
        [*command, "--workers", "2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"are those of the text: {', '.join(STATE)}")
    corpus = Path(f"{tmp_path / 'o'}_text_document.bin").read_bytes()
    assert corpus == encode(plain / "d.jsonl", plain, tmp_path / "b")


def test_text_produces_no_end_where_the_end_token_is_not_special(plain, tmp_path):
    def ordinary(content: dict) -> None:
        [token.update(special=False) for token in content["added_tokens"]]

    folder = variant(plain, tmp_path, ordinary)
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": ENDS}))
    encode(tmp_path / "d.jsonl", folder, tmp_path / "o")
    tokenizer = HuggingFaceTokenizer(folder)
    ids = IndexedDataset(f"{tmp_path / 'o'}_text_document")[0].tolist()
    assert ids.count(tokenizer.eod) == 1 and ids[-1] == tokenizer.eod
    assert tokenizer.decode(ids[:-1]) == ENDS
    assert ids[:-1] == HuggingFaceTokenizer(plain).encode(ENDS)


def unigram(pieces: str = "abcdefghijklmnopqrstuvwxyz<>/|", unk: int | None = 0):
    """A Unigram whose vocabulary holds its end token's text as the best of all pieces."""
    vocab = [("<unk>", 0.0), (EOD_TEXT, 0.0), ("\u2581", -2.0), *((c, -5.0) for c in pieces)]
    tokenizer = library.Tokenizer(models.Unigram(vocab, unk, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([EOD_TEXT])
    return tokenizer


def word_level(unk: str = "<unk>", *words: str):
    vocab = {word: number for number, word in enumerate(["<unk>", EOD_TEXT, *words])}
    tokenizer = library.Tokenizer(models.WordLevel(vocab, unk))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.mark.parametrize("make", [unigram, word_level])
def test_text_produces_no_end_where_the_vocabulary_holds_it_as_a_word(tmp_path, make):
    before = make()
    before.encode_special_tokens = True
    assert before.token_to_id(EOD_TEXT) in before.encode(ENDS).ids, "else this proves nothing"
    tokenizer = saved(make(), tmp_path)
    assert tokenizer.eod not in tokenizer.encode(ENDS)
    assert tokenizer.encode("one two") == before.encode("one two").ids
    if make is unigram:
        assert tokenizer.decode(tokenizer.encode(ENDS)) == ENDS


def test_an_end_token_that_text_must_produce_is_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    with pytest.raises(DataError, match=r"text produces its end-of-document id \d+ .'a'.; name"):
        saved(unigram(), tmp_path)


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>"}])
def test_a_named_end_token_that_is_not_there_is_refused(plain, tmp_path, eos):
    folder = variant(plain, tmp_path, lambda j: None)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    with pytest.raises(DataError, match="config.json: eos_token '</s>' is not in the vocabulary"):
        HuggingFaceTokenizer(folder)


@pytest.mark.parametrize("eos", [5, ["</s>"], {"id": 1}])
def test_a_named_end_token_is_a_text(plain, tmp_path, eos):
    folder = variant(plain, tmp_path, lambda j: None)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    with pytest.raises(DataError, match="eos_token .* expected a text"):
        HuggingFaceTokenizer(folder)


def report(tmp_path: Path, kind: str, texts: list[str], workers: int = 1) -> PreprocessReport:
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    options = PreprocessOptions(kind, str(tmp_path))
    return preprocess([str(tmp_path / "d.jsonl")], str(tmp_path / "o"), options, workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_characters_without_an_id_are_counted_and_named(tmp_path, workers):
    saved(unigram(), tmp_path)
    texts = ["abc", "a\u00e9\u65e5 b\u00e9", "\u00e9"]
    found = report(tmp_path, "HuggingFaceTokenizer", texts, workers)
    assert found.lost == {"\u00e9": 3, "\u65e5": 1} and found.lossy == 2
    assert found.lines()[-1] == (
        "4 characters in 2 texts do not come back from their ids: 3 '\u00e9', 1 '\u65e5'; the "
        "tokenizer has no id for them, or changes them"
    )


# In other processes two batches, of 1024 and 176 texts, are under way before the first is back.
@pytest.mark.parametrize(("workers", "counted"), [(1, 1000), (2, 1176)])
def test_characters_are_counted_in_the_first_texts_alone(plain, tmp_path, workers, counted):
    """A normalizer that changes every text must not make all of them slow."""
    tokenizer = library.Tokenizer.from_file(str(plain / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Lowercase()
    saved(tokenizer, tmp_path)
    found = report(tmp_path, "HuggingFaceTokenizer", ["Other"] * 1200, workers)
    assert found.lost == {"O": counted}
    assert found.lines()[-1] == (
        f"{counted} characters in {counted} texts do not come back from their ids: {counted} 'O'; "
        f"the tokenizer has no id for them, or changes them; {1200 - counted} more texts come back "
        "changed (not counted by character)"
    )


def test_a_vocabulary_that_drops_what_it_lacks_is_told(tmp_path):
    tokenizer = library.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, EOD_TEXT: 2}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    saved(tokenizer, tmp_path)
    assert report(tmp_path, "HuggingFaceTokenizer", ["ab", "a\u65e5\u00e9b", "cc"]).lost == {
        "\u65e5": 1,
        "\u00e9": 1,
        "c": 2,
    }


@pytest.mark.parametrize(
    ("normalizer", "lost"),
    [
        (normalizers.Lowercase(), {"A": 1}),
        (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), {"\u00e9": 1}),
        (normalizers.Replace("b", ""), {"b": 1}),
        (normalizers.NFKC(), {"\ufb01": 1}),
        (normalizers.NFC(), {}),
        (normalizers.NFD(), {}),
    ],
    ids=["lowercase", "accents", "replace", "nfkc", "nfc", "nfd"],
)
def test_what_a_normalizer_takes_away_is_counted(plain, tmp_path, normalizer, lost):
    tokenizer = library.Tokenizer.from_file(str(plain / "tokenizer.json"))
    tokenizer.normalizer = normalizer
    saved(tokenizer, tmp_path)
    text = "A\u00e9b \ufb01 \n x"
    assert report(tmp_path, "HuggingFaceTokenizer", [text]).lost == lost


def test_a_vocabulary_without_its_unknown_token_makes_bad_records(tmp_path):
    for tokenizer in (unigram(unk=None), word_level("[UNK]", "a")):
        saved(tokenizer, tmp_path)
        with pytest.raises(DataError, match=r"d\.jsonl:2: the tokenizer has no ids for this: "):
            report(tmp_path, "HuggingFaceTokenizer", ["a", "\u65e5"])


def sentencepiece_model(folder: Path, **options) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE),
        model_writer=model,
        model_type="bpe",
        vocab_size=300,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


def test_sentencepiece_counts_what_it_lacks_and_changes(tmp_path):
    sentencepiece_model(tmp_path)  # the library's defaults: NFKC, joined spaces, no bytes
    found = report(tmp_path, "SentencePieceTokenizer", ["The fox", "the\u65e5 \ufb01x\n\tdog"])
    assert found.lost == {"\u65e5": 1, "\ufb01": 1, "\n": 1, "\t": 1} and found.lossy == 1


def test_sentencepiece_refuses_an_end_that_text_produces(tmp_path):
    sentencepiece_model(tmp_path, user_defined_symbols=[EOD_TEXT], eos_id=-1)
    with pytest.raises(DataError, match=r"produces its end-of-document id \d+.*control symbol"):
        SentencePieceTokenizer(tmp_path)
    sentencepiece_model(tmp_path, control_symbols=[EOD_TEXT], eos_id=-1)
    tokenizer = SentencePieceTokenizer(tmp_path)
    assert tokenizer.eod not in tokenizer.encode(ENDS)


def test_lost_characters():
    assert lost_characters("abc", "abc") == {}
    assert lost_characters("aab", "ba") == {"a": 1}
    assert lost_characters("a", "xax") == {}
    assert lost_characters("e\u0301", "\u00e9") == {}
