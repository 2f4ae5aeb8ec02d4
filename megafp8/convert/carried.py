"""Files that go with the weights: tokenizer, generation settings, the original `config.json`."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megafp8.config import RunConfig
from megafp8.convert.hf_fields import read_json
from megafp8.data.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, build_tokenizer
from megafp8.errors import DataError
from megafp8.log import get_logger

FOLDER = "tokenizer"
CONFIG_NAME = "config.json"
NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "gpt2-vocab.json",
    "gpt2-merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)

# What reads which file; the first that is there counts.
_TOKENIZERS = {
    "tokenizer.json": HuggingFaceTokenizer,
    "tokenizer.model": SentencePieceTokenizer,
    "vocab.json": HuggingFaceTokenizer,
}
_PADDING = "--make-vocab-size-divisible-by"

log = get_logger(__name__)


def find_carried(folder: Path) -> tuple[Path, ...]:
    """The files of a folder that a converted model takes along."""
    return tuple(folder / name for name in NAMES if (folder / name).is_file())


def copy_carried(files: Iterable[Path], target: Path) -> None:
    """Copy files into a folder, which is made for the first."""
    for file in files:
        target.mkdir(exist_ok=True)
        shutil.copyfile(file, target / file.name)


def data_section(folder: Path, vocab_size: int, rows: int) -> dict[str, Any]:
    """Section `data` for a model whose tokenizer lies in `folder`.

    A tokenizer that cannot be used is left out of it with a warning; the files are carried along
    nevertheless, since others may read them.

    Args:
        folder: Of the model.
        vocab_size: Its tokens.
        rows: Those of its vocabulary with the padding.
    """
    values: dict[str, Any] = {"vocab_size": vocab_size}
    name = next((name for name in _TOKENIZERS if (folder / name).is_file()), None)
    if name is None:
        return values
    build = _TOKENIZERS[name]
    try:
        tokenizer = build(folder)
    except DataError as error:
        log.warning("no --tokenizer-type is set: %s", error)
        return values
    for note in tokenizer.notes:
        log.warning("%s", note)
    size = tokenizer.vocab_size
    if size <= vocab_size:
        return values | {"tokenizer_type": build.__name__, "tokenizer_model": str(folder)}
    room = "" if size <= rows else f"convert with {_PADDING} {-(-size // 128) * 128}, then "
    log.warning(
        "no --tokenizer-type is set: %s has %d ids, %d more than the model, which nobody trained; "
        "to train them, %sgive the run this tokenizer, --vocab-size %d and --new-tokens-from-mean",
        folder / name,
        size,
        size - vocab_size,
        room,
        size,
    )
    return values


def run_folder(config: RunConfig, checkpoint: Path) -> Path | None:
    """Where the tokenizer of a run of ours lies: as configured, else beside its checkpoints."""
    model = config.data.tokenizer_model
    if model is not None and Path(model).exists():
        return Path(model) if Path(model).is_dir() else Path(model).parent
    beside = checkpoint.parent / FOLDER
    return beside if beside.is_dir() else None


def source_config(folder: Path | None) -> Mapping[str, Any]:
    """The `config.json` that an import left beside the tokenizer; empty if there is none."""
    if folder is None or not (folder / CONFIG_NAME).is_file():
        return {}
    return read_json(folder / CONFIG_NAME)


def end_of_document(config: RunConfig) -> int | None:
    """The tokenizer's end-of-document id; None without a tokenizer here."""
    try:
        tokenizer = build_tokenizer(config.data)
    except DataError as error:
        log.warning("the end-of-document id is not known: %s", error)
        return None
    return None if tokenizer is None else tokenizer.eod
