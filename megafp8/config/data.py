"""Section `data`: corpora and tokenizer."""

from typing import Literal, get_args

from pydantic import Field, field_validator

from megafp8.config.base import NonNegativeInt, PositiveInt, Section
from megafp8.config.paths import FilePath

DEFAULT_SPLIT = (969.0, 30.0, 1.0)
TokenizerType = Literal[
    "SentencePieceTokenizer", "HuggingFaceTokenizer", "ByteTokenizer", "NullTokenizer"
]
TOKENIZER_TYPES: tuple[TokenizerType, ...] = get_args(TokenizerType)
WITHOUT_MODEL = ("ByteTokenizer", "NullTokenizer")  # these read no file
BYTE_TOKENIZER_SIZE = 257  # 256 bytes and the end of a document


class DataConfig(Section):
    """Where samples come from."""

    data_path: tuple[FilePath, ...] | None = Field(
        default=None,
        strict=False,
        description="path of .bin/.idx without the suffix; a blend is refused",
    )
    train_data_path: tuple[FilePath, ...] | None = Field(
        default=None, strict=False, description="as --data-path, for training alone"
    )
    valid_data_path: tuple[FilePath, ...] | None = Field(
        default=None, strict=False, description="as --data-path, for validation alone"
    )
    test_data_path: tuple[FilePath, ...] | None = Field(
        default=None, strict=False, description="as --data-path, for testing alone"
    )
    split: str | None = Field(
        default=None, description="train,valid,test proportions of --data-path (default 969,30,1)"
    )
    data_cache_path: FilePath | None = Field(default=None, description="folder for sample indices")
    mock_data: bool = Field(default=False, description="generated samples instead of a corpus")
    num_workers: NonNegativeInt = Field(default=2, description="processes that read ahead")
    tokenizer_type: TokenizerType | None = Field(default=None, description="kind of tokenizer")
    tokenizer_model: FilePath | None = Field(
        default=None, description="file or folder of the tokenizer"
    )
    vocab_size: PositiveInt | None = Field(
        default=None,
        description="tokens before padding; NullTokenizer adds one for end of document",
    )
    reset_position_ids: bool = Field(
        default=False, description="positions start anew in each document (refused: not built yet)"
    )
    reset_attention_mask: bool = Field(
        default=False, description="attention stays within a document (refused: not built yet)"
    )
    eod_mask_loss: bool = Field(default=False, description="no loss on end-of-document tokens")

    @field_validator("data_path", "train_data_path", "valid_data_path", "test_data_path")
    @classmethod
    def _corpus_is_one(cls, words: tuple[FilePath, ...] | None) -> tuple[FilePath, ...] | None:
        return None if words is None else (_one_corpus(words),)

    @field_validator("split")
    @classmethod
    def _split_is_three_numbers(cls, text: str | None) -> str | None:
        if text is not None:
            parse_split(text)
        return text

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """Train, valid and test proportions as given; their sum is positive."""
        return DEFAULT_SPLIT if self.split is None else parse_split(self.split)

    @property
    def has_source(self) -> bool:
        """Whether training has anything to read."""
        return self.mock_data or self.data_path is not None or self.train_data_path is not None


def tokenizer_refusal(kind: str, model: str | None, vocab_size: int | None) -> str | None:
    """Return why flags give no tokenizer, or None.

    Args:
        kind: `--tokenizer-type`, one of `TOKENIZER_TYPES`.
        model: `--tokenizer-model`.
        vocab_size: `--vocab-size`.
    """
    if kind in WITHOUT_MODEL and model is not None:
        return f"--tokenizer-type {kind} takes no --tokenizer-model, found {model}"
    if kind not in WITHOUT_MODEL and model is None:
        return f"--tokenizer-type {kind} needs --tokenizer-model PATH"
    if kind == "NullTokenizer" and vocab_size is None:
        return "--tokenizer-type NullTokenizer needs --vocab-size"
    return None


def _one_corpus(words: tuple[FilePath, ...]) -> FilePath:
    """Return the prefix of `PREFIX` or Megatron's `WEIGHT PREFIX`, which weighs nothing alone.

    Raises:
        ValueError: With what to do, for a blend.
    """
    if len(words) == 2 and _is_weight(words[0]):
        words = words[1:]
    if len(words) != 1:
        raise ValueError(
            "one corpus, PREFIX or WEIGHT PREFIX (a blend is not built yet in this version; "
            "tools/preprocess_data.py writes one corpus of all files of --input)"
        )
    return words[0]


def _is_weight(word: str) -> bool:
    try:
        return 0 < float(word) < float("inf")
    except ValueError:
        return False


def parse_split(text: str) -> tuple[float, float, float]:
    """Read `969,30,1`; missing parts at the end are 0, as in Megatron.

    Raises:
        ValueError: With the allowed form, for anything else.
    """
    allowed = "up to three numbers >= 0 with commas between and a positive sum, such as 969,30,1"
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(allowed) from None
    if len(weights) > 3 or not all(0 <= weight < float("inf") for weight in weights):
        raise ValueError(allowed)
    if sum(weights) <= 0:
        raise ValueError(allowed)
    train, valid, test = weights + [0.0] * (3 - len(weights))
    return train, valid, test
