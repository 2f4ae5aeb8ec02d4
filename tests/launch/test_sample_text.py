"""Text from a checkpoint whose run had a tokenizer, or none, or another one."""

import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import megafp8.launch.sample as sample
from megafp8.errors import CheckpointError, DataError
from megafp8.train.state import TrainState
from tests.model.small import small_config, start_run, world
from tests.support.states import save_state

TOOL = Path(__file__).resolve().parents[2] / "tools" / "generate.py"
VOCAB = 300


@pytest.fixture(scope="module")
def source(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run on mock data, whose model has more ids than there are bytes."""
    config = small_config(num_layers=2, vocab_size=VOCAB, tokenizer_type=None, mock_data=True)
    run = start_run(config, VOCAB)
    root = tmp_path_factory.mktemp("mock")
    save_state(root, TrainState(1), run.step, VOCAB)
    return root


@pytest.fixture(autouse=True)
def in_this_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "start", lambda *_: world())
    monkeypatch.setattr(sample, "stop", lambda: None)


def text_of(source: Path, *tokenizer: str | None, prompt: str = "5 7") -> str:
    return sample.sample_text(source, prompt, 20, 1.0, 3, *tokenizer)


def test_a_run_without_a_tokenizer_says_what_to_give(source: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer; give --tokenizer-type .*ByteTokenizer"):
        text_of(source)


def test_a_tokenizer_that_is_given_is_used(source: Path) -> None:
    ids = [int(word) for word in text_of(source, "NullTokenizer").split()]
    assert ids[:2] == [5, 7] and len(ids) > 2 and max(ids) < VOCAB
    # Ids above the bytes' are never drawn.
    text = text_of(source, "ByteTokenizer")
    assert text.startswith("5 7") and len(text) > 3


def test_a_tokenizer_that_does_not_fit_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="HuggingFaceTokenizer needs --tokenizer-model"):
        text_of(source, "HuggingFaceTokenizer")
    with pytest.raises(DataError, match="--tokenizer-model .*none: no such file"):
        text_of(source, "SentencePieceTokenizer", str(tmp_path / "none"))


def test_a_prompt_is_its_text_and_what_is_not_seen_of_it_is_told(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tokenizers.Tokenizer(WordLevel({"<unk>": 0, "<eos>": 1, "fox": 2}, "<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.enable_padding(length=64, pad_id=2, pad_token="fox")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = sample.sample_text(
        source, "fox \u00e9", 0, 1.0, 3, "HuggingFaceTokenizer", str(tmp_path)
    )
    assert text == "fox <unk>", "padding is no part of a prompt"
    told = capsys.readouterr().err
    assert "switched off, since ids are those of the text: padding" in told
    assert "--prompt: characters that the model does not see: 1 '\u00e9'" in told


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megafp8.data.tokenizers.ByteTokenizer.vocab_size", VOCAB + 1)
    with pytest.raises(DataError, match="ByteTokenizer has 301 ids, more than the 300 of"):
        text_of(source, "ByteTokenizer")


def test_a_tokenizer_with_fewer_ids_than_the_model_is_told(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows behind its ids may be padding, or the sign of a wrong one."""
    text_of(source, "ByteTokenizer")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ByteTokenizer has 257 ids, fewer than the 300 of" in line
    assert "ids from 257 on are never drawn" in line
    text_of(source, "NullTokenizer")
    assert capsys.readouterr().err == ""


def test_a_file_for_a_tokenizer_without_one_is_refused(source: Path) -> None:
    for kind in ("ByteTokenizer", "NullTokenizer"):
        with pytest.raises(DataError, match=f"{kind} takes no --tokenizer-model, found x"):
            text_of(source, kind, "x")


def test_another_tokenizer_takes_nothing_of_the_runs() -> None:
    data = small_config(
        tokenizer_type="SentencePieceTokenizer", tokenizer_model="old", vocab_size=VOCAB
    ).data
    assert sample.with_tokenizer(data, None, None, VOCAB) == data
    assert sample.with_tokenizer(data, None, "new", VOCAB).tokenizer_model == "new"
    same = sample.with_tokenizer(data, "SentencePieceTokenizer", None, VOCAB)
    assert same.tokenizer_model == "old"
    other = sample.with_tokenizer(data, "HuggingFaceTokenizer", None, VOCAB)
    assert other.tokenizer_model is None
    unread = data.model_copy(update={"tokenizer_type": "ByteTokenizer"})
    assert sample.with_tokenizer(unread, None, None, VOCAB).tokenizer_model is None


def test_a_folder_without_a_checkpoint_is_told_from_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none holds no checkpoint: no such folder$"):
        text_of(tmp_path / "none")
    with pytest.raises(CheckpointError, match="holds no checkpoint$"):
        text_of(tmp_path)


def test_the_tool_has_the_flags() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--load", "x", "--tokenizer-type", "Nope"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "--tokenizer-type: invalid choice: 'Nope'" in done.stderr
    assert "ByteTokenizer" in done.stderr
