"""Tokenizers behind one small protocol: text to ids and back, with one end-of-document id.

The text of a document never produces the end-of-document id: a literal "<|endoftext|>" in it is
encoded as ordinary characters. `decode` shows that id as "<|endoftext|>". Ids are those of the
whole text and nothing else; what a tokenizer itself cannot keep, `lost_characters` counts.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers as hf_tokenizers

from megafp8.config.data import BYTE_TOKENIZER_SIZE, tokenizer_refusal
from megafp8.data.tokenizer_json import (
    CONFIG_NAME,
    definition_files,
    find_definition,
    mark_special,
    named_end,
    read_definition,
    split_inside,
    switch_off_state,
)
from megafp8.errors import DataError

EOD_TEXT = "<|endoftext|>"

# Names under which tokenizers of other origin keep their end-of-document token, best first.
_EOD_NAMES = (EOD_TEXT, "<EOD>", "<|end_of_text|>", "</s>", "<eos>")

# SentencePiece writes a space as this character, so the character itself would come back as one.
_SPACE_SYMBOL = "\u2581"

# Lost characters that a message names.
_NAMED = 5


class Tokenizer:
    """What preprocessing, training and sampling need of a tokenizer.

    Attributes:
        vocab_size: Number of ids, added tokens and the end-of-document id included.
        eod: Id that ends a document.
        notes: What of the tokenizer's files is not followed; a sentence each, to tell the user.
        files: The files that ids follow from.
    """

    vocab_size: int
    eod: int
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without an end-of-document id.

        Raises:
            DataError: The tokenizer has no id for something in it, nor one for what it lacks.
            UnicodeEncodeError: `text` holds a lone surrogate, which is no character.
        """
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`."""
        raise NotImplementedError


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte (0..255) and 256 for the end of a document."""

    vocab_size = BYTE_TOKENIZER_SIZE
    eod = BYTE_TOKENIZER_SIZE - 1

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of `text`."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; bytes that are not UTF-8 (a sampled fragment) show as U+FFFD."""
        return _join_documents(ids, self.eod, lambda run: bytes(run).decode("utf-8", "replace"))


class NullTokenizer(Tokenizer):
    """Megatron's tokenizer for benchmarks: text is ids in decimal, separated by blanks.

    Args:
        vocab_size: Number of ordinary ids. As in Megatron, one more is added behind them for the
            end of a document: `NullTokenizer(100)` has eod 100 and vocab_size 101.
    """

    def __init__(self, vocab_size: int) -> None:
        assert vocab_size >= 1, vocab_size
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1

    def encode(self, text: str) -> list[int]:
        """Return the numbers in `text`.

        Raises:
            DataError: A word is no number, or not an ordinary id.
        """
        ids = []
        for word in text.split():
            # isdecimal alone also admits other scripts' digits.
            if not (word.isascii() and word.isdecimal() and int(word) < self.eod):
                raise DataError(f"NullTokenizer: {word[:20]!r} is not an id in 0..{self.eod - 1}")
            ids.append(int(word))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the ids in decimal, the end-of-document id too."""
        return " ".join(str(int(token)) for token in ids)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    Args:
        path: Model file, or a folder that holds `tokenizer.model`.
    """

    def __init__(self, path: str | Path) -> None:
        file = _model_file(path, "tokenizer.model")
        self.files = (file,)
        if file.stat().st_size == 0:  # a valid message of the format, which the library takes
            raise DataError(f"{file}: not a SentencePiece model (the file is empty)")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())
        except (RuntimeError, OSError) as error:
            raise DataError(f"{file}: not a SentencePiece model ({_one_line(error)})") from error
        self.vocab_size = int(self._processor.get_piece_size())
        self.eod = self._find_eod(file)
        self._space_symbol_ids = self._byte_ids(_SPACE_SYMBOL)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; a model with byte pieces keeps every character."""
        if self._space_symbol_ids is None or _SPACE_SYMBOL not in text:
            return self._encode_run(text)
        first, *rest = text.split(_SPACE_SYMBOL)
        ids = self._encode_run(first)
        for run in rest:
            ids += self._space_symbol_ids
            ids += self._encode_run(run)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`."""
        return _join_documents(ids, self.eod, self._processor.decode)

    def _encode_run(self, text: str) -> list[int]:
        _require_characters(text)
        return self._processor.encode(text)

    def _find_eod(self, file: Path) -> int:
        eos = int(self._processor.eos_id())
        if eos >= 0:
            return eos
        for name in _EOD_NAMES:
            token = int(self._processor.piece_to_id(name))
            if token == self._processor.unk_id():
                continue
            if token in self._processor.encode(name):
                raise DataError(
                    f"{file}: text produces its end-of-document id {token}, since {name!r} is an "
                    "ordinary or user-defined piece; train it as a control symbol "
                    f"(spm_train --eos_piece={name}, or --control_symbols)"
                )
            return token
        raise DataError(f"{file}: no end-of-document token; expected one of {_EOD_NAMES}")

    def _byte_ids(self, text: str) -> list[int] | None:
        ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in text.encode("utf-8")]
        return ids if all(self._processor.is_byte(token) for token in ids) else None


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` of the `tokenizers` library; nothing is downloaded.

    Truncation, padding and dropout that the file holds are off, and told in `notes`.

    Args:
        path: The file, or a folder that holds `tokenizer.json`; or GPT-2's `vocab.json` with
            `merges.txt` beside it, or their folder. A `tokenizer_config.json` there may name the
            end-of-document token as `eos_token`.
    """

    def __init__(self, path: str | Path) -> None:
        file = find_definition(path)
        self.files = definition_files(file)
        content = read_definition(file)
        off = switch_off_state(content)
        self._tokenizer = _load_definition(file, content)
        # Ids may have gaps, and an embedding needs room for the largest.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        name, self.eod = self._find_eod(file)
        keep_out = iter((mark_special, split_inside))
        while self._text_ends(name):
            change = next(keep_out, None)
            if change is None:
                raise DataError(
                    f"{file}: text produces its end-of-document id {self.eod} ({name!r}); name "
                    f"another token as eos_token in {CONFIG_NAME}"
                )
            change(content, name)
            self._tokenizer = _load_definition(file, content)
        note = f"{file}: switched off, since ids are those of the text: {', '.join(off)}"
        self.notes = (note,) if off else ()

    def _text_ends(self, name: str) -> bool:
        """Whether the end token's text produces its id."""
        try:
            return self.eod in self.encode(name)
        except DataError:
            return False

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with no token added around them."""
        _require_characters(text)
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises bare Exception where it lacks an unk token
            raise DataError(f"the tokenizer has no ids for this: {_one_line(error)}") from error

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return _join_documents(
            ids, self.eod, lambda run: self._tokenizer.decode(run, skip_special_tokens=False)
        )

    def _find_eod(self, file: Path) -> tuple[str, int]:
        """The end-of-document token's text and id."""
        named = named_end(file)
        for name in _EOD_NAMES if named is None else (named,):
            token = self._tokenizer.token_to_id(name)
            if token is not None:
                return name, int(token)
        if named is not None:
            raise DataError(
                f"{file.with_name(CONFIG_NAME)}: eos_token {named!r} is not in the vocabulary of "
                f"{file.name}; name a token of it that ends documents"
            )
        raise DataError(
            f"{file}: no end-of-document token; expected one of {_EOD_NAMES}, or eos_token in "
            f"{CONFIG_NAME}"
        )


def _load_definition(file: Path, content: dict[str, Any]) -> hf_tokenizers.Tokenizer:
    try:
        tokenizer = hf_tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise DataError(f"{file}: not a tokenizer ({_one_line(error)})") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def lost_characters(text: str, back: str) -> Counter[str]:
    """Count the characters of `text` that do not come back from its ids.

    These are what the vocabulary lacks (unknown or dropped), and what a normalizer takes out or
    makes another character of. Order does not count, nor what is in `back` alone, nor which of
    Unicode's canonically equivalent spellings a character has.

    Args:
        text: What was encoded.
        back: What its ids decode to.
    """
    if back == text:
        return Counter()
    whole, kept = (Counter(unicodedata.normalize("NFC", one)) for one in (text, back))
    return whole - kept


def most_lost(lost: Counter[str]) -> str:
    """The most frequent characters of `lost_characters` for a message."""
    most = ", ".join(f"{count} {text!r}" for text, count in lost.most_common(_NAMED))
    return most + (f" and {len(lost) - _NAMED} other kinds" if len(lost) > _NAMED else "")


def build_tokenizer(data: Any) -> Tokenizer | None:
    """Build the tokenizer that the data section names.

    Args:
        data: Has `tokenizer_type`, `tokenizer_model` and `vocab_size` (None where not given).

    Returns:
        The tokenizer; None if `tokenizer_type` is None.

    Raises:
        DataError: The model is missing or unreadable, or given to a type that reads none.
    """
    kind, model = data.tokenizer_type, data.tokenizer_model
    if kind is None:
        return None
    if refusal := tokenizer_refusal(kind, model, data.vocab_size):
        raise DataError(refusal)
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        return NullTokenizer(data.vocab_size)
    return (
        SentencePieceTokenizer(model)
        if kind == "SentencePieceTokenizer"
        else HuggingFaceTokenizer(model)
    )


def resolve_vocab_size(data: Any, tokenizer: Tokenizer | None = None) -> int:
    """Return the number of ids that the model needs, before padding.

    Args:
        data: The data section, as in `build_tokenizer`.
        tokenizer: Already built one; else it is built from `data`.

    Returns:
        The tokenizer's size, or a larger `--vocab-size`. Of a NullTokenizer `--vocab-size` is the
        number of ordinary ids and the result is one more (Megatron's meaning).

    Raises:
        DataError: `--vocab-size` is smaller than the tokenizer, or nothing tells the size.
    """
    tokenizer = tokenizer or build_tokenizer(data)
    if tokenizer is None:
        if data.vocab_size is None:
            raise DataError("the vocabulary size is unknown: give --tokenizer-type or --vocab-size")
        return int(data.vocab_size)
    if data.vocab_size is None or isinstance(tokenizer, NullTokenizer):
        return tokenizer.vocab_size
    if data.vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"--vocab-size {data.vocab_size} is smaller than the tokenizer's "
            f"{tokenizer.vocab_size} ids; give --vocab-size {tokenizer.vocab_size} or more"
        )
    return int(data.vocab_size)


def _require_characters(text: str) -> None:
    """Raise UnicodeEncodeError for a lone surrogate, which the libraries drop or misname."""
    text.encode("utf-8")


def _join_documents(ids: Iterable[int], eod: int, decode_run: Any) -> str:
    """Decode the runs between end-of-document ids and put EOD_TEXT between them."""
    texts, run = [], []
    for token in ids:
        if int(token) == eod:
            texts.append(decode_run(run) if run else "")
            run = []
        else:
            run.append(int(token))
    texts.append(decode_run(run) if run else "")
    return EOD_TEXT.join(texts)


def _model_file(path: str | Path, name: str) -> Path:
    given = Path(path)
    file = given / name if given.is_dir() else given
    if not file.is_file():
        what = f"the folder holds no {name}" if given.is_dir() else "no such file"
        raise DataError(f"--tokenizer-model {path}: {what}")
    return file


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
