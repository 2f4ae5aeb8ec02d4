"""What a `tokenizer.json` defines, without the state that others left in it.

Libraries for fine-tuning save the truncation and padding of their batches with the tokenizer, and a
BPE may have a dropout. Ids would then not be those of the text: all of it is switched off.

GPT-2's older pair of files, `vocab.json` and `merges.txt`, is read as the same definition.
"""

import json
import re
from pathlib import Path
from typing import Any

from megafp8.errors import DataError

JSON_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
_VOCAB, _MERGES, _ADDED = "vocab.json", "merges.txt", "added_tokens.json"
# Others keep pairs of the same names and split or change text in another way.
_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")


def find_definition(path: str | Path) -> Path:
    """Return the `tokenizer.json`, or the `vocab.json` with its merges beside it.

    Args:
        path: A file of either kind, or its folder. The names of a pair may begin alike, as those of
            `gpt2-vocab.json` and `gpt2-merges.txt` do.

    Raises:
        DataError: There is none, or more than one pair.
    """
    given = Path(path)
    if given.is_file():
        if given.name.endswith(_VOCAB) and not merges_of(given).is_file():
            raise DataError(f"--tokenizer-model {path}: {merges_of(given)} is not there")
        return given
    if not given.is_dir():
        raise DataError(f"--tokenizer-model {path}: no such file")
    if (given / JSON_NAME).is_file():
        return given / JSON_NAME
    pairs = [file for file in sorted(given.glob(f"*{_VOCAB}")) if merges_of(file).is_file()]
    if len(pairs) == 1:
        return pairs[0]
    held = f"no {JSON_NAME}, and no {_VOCAB} with {_MERGES}"
    if pairs:
        held = f"{', '.join(file.name for file in pairs)}: name one of them"
    raise DataError(f"--tokenizer-model {path}: the folder holds {held}")


def definition_files(file: Path) -> tuple[Path, ...]:
    """Return what `read_definition` reads of a `file` from `find_definition`."""
    if not file.name.endswith(_VOCAB):
        return (file,)
    added = file.with_name(_ADDED)
    return (file, merges_of(file), *((added,) if added.is_file() else ()))


def merges_of(vocab: Path) -> Path:
    """Where the merges of a `vocab.json` lie."""
    return vocab.with_name(vocab.name.removesuffix(_VOCAB) + _MERGES)


def read_definition(file: Path) -> dict[str, Any]:
    """Return the content of a `tokenizer.json`, or the one that GPT-2's pair of files stands for.

    Args:
        file: From `find_definition`.

    Raises:
        DataError: A file is not of its format, or the pair is that of another tokenizer.
    """
    if not file.name.endswith(_VOCAB):
        return read_object(file, JSON_NAME)
    config = _beside(file, CONFIG_NAME)
    kind = config.get("tokenizer_class", _GPT2_CLASSES[0])
    if kind not in _GPT2_CLASSES:
        raise DataError(
            f"{file}: {CONFIG_NAME} says tokenizer_class {kind}, and without {JSON_NAME} a pair of "
            f"vocabulary and merges is read as GPT-2's; let transformers write {JSON_NAME}: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    vocab = read_object(file, _VOCAB)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": bool(config.get("add_prefix_space", False)),
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(file, config, vocab),
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": _read_merges(merges_of(file))},
    }


def _read_merges(file: Path) -> list[str]:
    try:
        # Only a line feed ends a line: the alphabet of bytes has characters that look like others.
        lines = [line.rstrip("\r") for line in file.read_text("utf-8").split("\n")]
    except ValueError as error:
        raise DataError(f"{file}: not UTF-8 ({error})") from error
    first = 1 if lines[0].startswith("#version") else 0
    return [line for line in lines[first:] if line]


def _added_tokens(
    file: Path, config: dict[str, Any], vocab: dict[str, Any]
) -> list[dict[str, Any]]:
    """Tokens beyond `vocab.json`, in the order of their ids."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added = {content: {"id": token} for content, token in _beside(file, _ADDED).items()}
    try:
        for token, value in config.get("added_tokens_decoder", {}).items():
            added[value["content"]] = {"id": int(token), **value}
        entries = [{**flags, **value, "content": content} for content, value in added.items()]
        entries.sort(key=lambda entry: entry["id"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file.parent}: its added tokens are malformed ({error!r})") from error
    new = [entry["id"] for entry in entries if entry["content"] not in vocab]
    expected = list(range(len(vocab), len(vocab) + len(new)))
    if new != expected:  # the library numbers them so, whatever is written
        raise DataError(f"{file.parent}: added tokens have ids {new}, expected {expected}")
    return entries


def switch_off_state(content: dict[str, Any]) -> list[str]:
    """Take truncation, padding and dropout out of a definition; return what was there."""
    found = []
    for name in ("truncation", "padding"):
        if (value := content.get(name)) is not None:
            length = value.get("max_length") if isinstance(value, dict) else None
            found.append(name if length is None else f"{name} (max_length {length})")
            content[name] = None
    model = content.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        found.append(f"model.dropout {model['dropout']}")
        model["dropout"] = None
    return found


def mark_special(content: dict[str, Any], name: str) -> None:
    """Make an added token special: the library then encodes its text as ordinary characters."""
    for token in content.get("added_tokens", []):
        if token["content"] == name:
            token["special"] = True


def split_inside(content: dict[str, Any], name: str) -> None:
    """Let a piece end after the first character of `name`: no piece of text is `name` any more.

    A Unigram's or a word-level vocabulary may hold the name as an ordinary entry.
    """
    cut = {
        "type": "Split",
        "pattern": {"Regex": f"{re.escape(name[:1])}(?={re.escape(name[1:])})"},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    before = content.get("pre_tokenizer")
    steps = [cut] if before is None else [before, cut]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}


def named_end(file: Path) -> str | None:
    """The `eos_token` of the `tokenizer_config.json` beside `file`; None if there is none.

    Raises:
        DataError: It is no text.
    """
    token = _beside(file, CONFIG_NAME).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(text, str):
        raise DataError(f"{file.with_name(CONFIG_NAME)}: eos_token {token!r}: expected a text")
    return text


def read_object(file: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        DataError: It holds something else.
    """
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{file}: not a {what} ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"{file}: not a {what} (no JSON object)")
    return value


def _beside(file: Path, name: str) -> dict[str, Any]:
    """The object in another file of the folder; empty if it is not there."""
    other = file.with_name(name)
    return read_object(other, name) if other.is_file() else {}
