"""GPT-2's pair of files, vocab.json and merges.txt, read as the tokenizer that it is."""

import json
from pathlib import Path

import pytest

from megafp8.config.cli import load_config
from megafp8.data.tokenizers import EOD_TEXT, HuggingFaceTokenizer
from megafp8.data.train_tokenizer import train_tokenizer
from megafp8.errors import ConfigurationError, DataError
from tests.support.oracles import need

PROSE = "The quick brown fox 123 jumps over the lazy dog's back, and they've seen it again.\n" * 30
TEXTS = [
    PROSE[:200],
    " leading,  two spaces\t\n\n trailing ",
    "it's they'll I'M 12 345,6 caf\u00e9 e\u0301 \u65e5\u672c \U0001f600 \u00a0\u3000x",
    "# # #version: x \r\n\x00\x7f",
    "<| endoftext|>",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """A folder of tokenizer.json, and one of the same as vocab.json and merges.txt."""
    whole, pair = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("pair")
    (whole / "a.txt").write_text(PROSE + "# # # # " * 50)
    train_tokenizer([str(whole / "a.txt")], whole, 300, "bpe")
    model = json.loads((whole / "tokenizer.json").read_text())["model"]
    write_pair(pair, model["vocab"], [" ".join(merge) for merge in model["merges"]])
    return whole, pair


def write_pair(folder: Path, vocab: dict[str, int], merges: list[str], begin: str = "") -> None:
    (folder / f"{begin}vocab.json").write_text(json.dumps(vocab))
    lines = ["#version: 0.2", *merges, ""]
    (folder / f"{begin}merges.txt").write_text("\n".join(lines), "utf-8")


def copy_pair(pair: Path, folder: Path, begin: str = "") -> Path:
    for name in ("vocab.json", "merges.txt"):
        (folder / (begin + name)).write_bytes((pair / name).read_bytes())
    return folder


def test_the_pair_gives_the_ids_of_the_whole_file(trained):
    whole, pair = map(HuggingFaceTokenizer, trained)
    assert (pair.vocab_size, pair.eod) == (whole.vocab_size, whole.eod)
    for text in (*TEXTS, f"one {EOD_TEXT} two"):
        assert pair.encode(text) == whole.encode(text)
        assert pair.decode(pair.encode(text)) == text


def test_the_pair_gives_the_ids_of_transformers(trained):
    need("transformers")
    import transformers

    pair = trained[1]
    oracle = transformers.GPT2Tokenizer(str(pair / "vocab.json"), str(pair / "merges.txt"))
    tokenizer = HuggingFaceTokenizer(pair)
    for text in TEXTS:
        assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.eod == oracle.eos_token_id


def test_a_file_names_the_pair_and_their_names_may_begin_alike(trained, tmp_path):
    copy_pair(trained[1], tmp_path, "gpt2-")
    for path in (tmp_path, tmp_path / "gpt2-vocab.json"):
        assert HuggingFaceTokenizer(path).vocab_size == 300
    copy_pair(trained[1], tmp_path, "other-")
    with pytest.raises(DataError, match="holds gpt2-vocab.json, other-vocab.json: name one"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "other-merges.txt").unlink()
    with pytest.raises(DataError, match=r"other-merges\.txt is not there"):
        HuggingFaceTokenizer(tmp_path / "other-vocab.json")


def test_added_tokens_keep_their_ids(trained, tmp_path):
    copy_pair(trained[1], tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<b>": 301, "<a>": 300}')
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert tokenizer.vocab_size == 302
    assert tokenizer.encode("<b><a>") == [301, 300]
    decoder = {"300": {"content": "<a>", "special": True}, "301": {"content": "<b>"}}
    config = {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert 300 not in HuggingFaceTokenizer(tmp_path).encode("<a>"), "a special token is no text"
    (tmp_path / "added_tokens.json").write_text('{"<c>": 500}')
    with pytest.raises(DataError, match=r"ids \[300, 301, 500\], expected \[300, 301, 302\]"):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", '{"tokenizer_class": "Qwen2Tokenizer"}', "says tokenizer_class"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "added tokens are malformed"),
        ("added_tokens.json", "[]", "not a added_tokens.json .no JSON object"),
        ("vocab.json", "{", "not a vocab.json"),
        ("merges.txt", "x yz\n", "not a tokenizer .Token `yz` out of vocabulary"),
    ],
)
def test_a_pair_that_is_not_gpt2s_is_refused(trained, tmp_path, name, content, message):
    copy_pair(trained[1], tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        HuggingFaceTokenizer(tmp_path)


def test_megatrons_flags_lead_to_the_pair(trained):
    """What the refusal of --vocab-file names is a command line that works."""
    flags = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1"]
    with pytest.raises(ConfigurationError) as caught:
        load_config([*flags, "--vocab-file", "v.json", "--merge-file", "m.txt"])
    assert "--tokenizer-type HuggingFaceTokenizer --tokenizer-model VOCAB.json" in str(caught.value)
    assert HuggingFaceTokenizer(trained[1] / "vocab.json").eod == 0
