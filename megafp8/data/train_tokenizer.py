"""Trains a SentencePiece or a byte-level BPE tokenizer, the same one at every call.

Both keep any text as it is: no normalisation, no added or merged spaces, and bytes for characters
outside the vocabulary. Both have "<|endoftext|>" as the end-of-document token.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers as hf_tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megafp8.data.sources import (
    DEFAULT_GLOBS,
    BadRecord,
    Inputs,
    expand_inputs,
    iterate_records,
    read_texts,
)
from megafp8.data.tokenizers import (
    EOD_TEXT,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from megafp8.errors import DataError
from megafp8.log import get_logger

TYPES = ("sentencepiece", "bpe")
FILE_OF_TYPE = {"sentencepiece": "tokenizer.model", "bpe": "tokenizer.json"}
CLASS_OF_TYPE = {"sentencepiece": "SentencePieceTokenizer", "bpe": "HuggingFaceTokenizer"}

# 256 bytes, the end-of-document token, and SentencePiece's mandatory unknown token.
MINIMUM_VOCAB_SIZE = 258

# More text changes a vocabulary of some ten thousand pieces little; 10 MB train in about 2 s.
DEFAULT_MAX_BYTES = 10 << 20
# Text is sampled and handed to the trainers in pieces of about this size, cut at line ends.
_PIECE_CHARACTERS = 4096

_PROBES = (
    "def f(x):\n\n\treturn {x: [1,  2]}   # two  spaces\r\n",
    "  leading and trailing  ",
    "caf\u00e9 \u65e5\u672c\u8a9e \U0001f600 \u2581 \u0000\u0001",
    f"<unk> <s> {EOD_TEXT} <0x0A>",
)


@dataclass(frozen=True)
class TokenizerReport:
    """What was trained.

    Attributes:
        path: Model file.
        tokenizer_type: Value for `--tokenizer-type`.
        vocab_size: Ids, the end-of-document token included.
        eod: Id of the end-of-document token.
        text_bytes: UTF-8 bytes that were trained on.
        bytes_per_token: Compression on that text.
        skipped: Bad records left out.
        inputs: Files that were read.
        seconds: Time taken.
    """

    path: Path
    tokenizer_type: str
    vocab_size: int
    eod: int
    text_bytes: int
    bytes_per_token: float
    skipped: int
    inputs: Inputs
    seconds: float

    def lines(self) -> list[str]:
        """Return the report as text."""
        return [
            self.inputs.line(),
            f"wrote {self.path}: {self.vocab_size} ids, end of document {self.eod}, "
            f"{self.bytes_per_token:.2f} bytes per token",
            f"trained on {self.text_bytes} bytes, skipped {self.skipped} bad records; "
            f"{self.seconds:.1f} s; use it with --tokenizer-type {self.tokenizer_type} "
            f"--tokenizer-model {self.path}",
        ]


def train_tokenizer(
    inputs: Sequence[str],
    output: str | Path,
    vocab_size: int,
    kind: str,
    *,
    globs: Sequence[str] = DEFAULT_GLOBS,
    exclude: Sequence[str] = (),
    json_keys: Sequence[str] = ("text",),
    max_bytes: int = DEFAULT_MAX_BYTES,
    skip_bad_records: bool = False,
) -> TokenizerReport:
    """Train a tokenizer and check that it gives back every probe text unchanged.

    Args:
        inputs: JSONL files, plain text files, folders.
        output: Folder for `tokenizer.model` or `tokenizer.json`; made if missing.
        vocab_size: Ids wanted, all special ones included. A small corpus may not have as many
            different pieces; the tokenizer is then smaller, and a warning says so.
        kind: "sentencepiece" (BPE with byte fallback) or "bpe" (byte-level, `tokenizers` library).
        globs: File name patterns for folders.
        exclude: File and folder name patterns to leave out of folders.
        json_keys: Keys of JSONL records.
        max_bytes: Text beyond this is sampled evenly over all inputs.
        skip_bad_records: Count bad records and go on, instead of stopping at the first.

    Raises:
        DataError: Bad input, a size out of range, or a trained model that loses characters.
    """
    if vocab_size < MINIMUM_VOCAB_SIZE:
        raise DataError(
            f"--vocab-size {vocab_size}: expected at least {MINIMUM_VOCAB_SIZE} (256 bytes, "
            "unknown, end of document)"
        )
    if Path(output).exists() and not Path(output).is_dir():
        raise DataError(f"--output {output} is a file, expected a folder")
    started = time.monotonic()
    found = expand_inputs(inputs, globs, exclude)
    files = found.files
    sampler = _Sampler(files, tuple(json_keys), max_bytes, skip_bad_records)
    pieces = list(sampler.pieces())
    if not pieces:
        raise DataError(f"no text to train on in {len(files)} files")
    model = _TRAINERS[kind](pieces, vocab_size)
    path = Path(output) / FILE_OF_TYPE[kind]
    tokenizer = _write_checked(path, model, kind, pieces)
    if tokenizer.vocab_size != vocab_size:
        get_logger(__name__).warning(
            "%s: %d ids instead of %d; the text has no more different pieces",
            path,
            tokenizer.vocab_size,
            vocab_size,
        )
    text_bytes = sum(len(piece.encode()) for piece in pieces)
    return TokenizerReport(
        path=path,
        tokenizer_type=CLASS_OF_TYPE[kind],
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        text_bytes=text_bytes,
        bytes_per_token=_bytes_per_token(tokenizer, pieces),
        skipped=sampler.skipped,
        inputs=found,
        seconds=time.monotonic() - started,
    )


class _Sampler:
    """Reads texts, cuts them at line ends and keeps an even share of the pieces."""

    def __init__(
        self, files: Sequence[Path], keys: Sequence[str], max_bytes: int, skip_bad_records: bool
    ) -> None:
        self.skipped = 0
        self._files, self._keys, self._skip = files, keys, skip_bad_records
        total = sum(file.stat().st_size for file in files)
        self._share = min(1.0, max_bytes / max(total, 1))

    def pieces(self) -> Iterator[str]:
        seen = kept = 0
        for text in self._texts():
            for piece in _cut(text):
                seen += len(piece)
                if kept <= self._share * seen - len(piece) / 2 or self._share == 1.0:
                    kept += len(piece)
                    yield piece

    def _texts(self) -> Iterator[str]:
        for record in iterate_records(self._files):
            try:
                yield from filter(None, read_texts(record, self._keys))
            except BadRecord as error:
                if not self._skip:
                    raise DataError(
                        f"{record.place}: {error.detail} (--skip-bad-records leaves such records "
                        "out)"
                    ) from None
                self.skipped += 1


def _cut(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + _PIECE_CHARACTERS
        if stop < len(text):
            line_end = text.rfind("\n", start, stop)
            stop = line_end + 1 if line_end >= 0 else stop
        yield text[start:stop]
        start = stop


def _train_sentencepiece(pieces: Sequence[str], vocab_size: int) -> bytes:
    model = BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for piece in pieces for line in piece.split("\n") if line),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            # The text as it is: code lives from its spaces.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            # One character in 10000 may fall back to bytes, so that rare ones take no ids.
            character_coverage=0.9999,
            max_sentence_length=4 * _PIECE_CHARACTERS + 4,  # in bytes; longer ones are dropped
            unk_id=0,
            eos_id=1,
            eos_piece=EOD_TEXT,
            bos_id=-1,
            pad_id=-1,
            hard_vocab_limit=False,
            num_threads=1,  # the model must not depend on the machine
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(
            f"SentencePiece cannot train {vocab_size} ids on this text: "
            f"{' '.join(str(error).split())}"
        ) from error
    return model.getvalue()


def _train_bpe(pieces: Sequence[str], vocab_size: int) -> bytes:
    tokenizer = hf_tokenizers.Tokenizer(models.BPE())
    # The library types these attributes as read-only unions; assignment is its documented use.
    target: Any = tokenizer
    target.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    target.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TEXT],
        # alphabet() comes from a hash set in another order at each call.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer.to_str().encode()


_TRAINERS = {"sentencepiece": _train_sentencepiece, "bpe": _train_bpe}


def _write_checked(path: Path, model: bytes, kind: str, pieces: Sequence[str]) -> Tokenizer:
    """Write the model under a temporary name, check it, and rename it."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    load = SentencePieceTokenizer if kind == "sentencepiece" else HuggingFaceTokenizer
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(model)
        tokenizer = load(temporary)
        for text in (*_PROBES, *pieces[:64]):
            back = tokenizer.decode(tokenizer.encode(text))
            if back != text:
                raise DataError(f"{path}: the trained model turns {text[:40]!r} into {back[:40]!r}")
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: cannot write: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return tokenizer


def _bytes_per_token(tokenizer: Tokenizer, pieces: Sequence[str]) -> float:
    step = max(1, len(pieces) // 64)
    sample = pieces[::step]
    tokens = sum(len(tokenizer.encode(piece)) for piece in sample)
    return sum(len(piece.encode()) for piece in sample) / max(tokens, 1)
