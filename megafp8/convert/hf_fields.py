"""`config.json` field by field: what is used, what is without effect, what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from megafp8.errors import CheckpointError

# Without effect on what the weights compute: identity of the file, generation defaults, training
# hints, outputs of other tasks, notes of the programs that made it. So are names that begin with
# `_`, transformers' own. Everything else that is not used has to be false or empty.
NEUTRAL = frozenset(
    "architectures attn_implementation begin_suppress_tokens bos_token_id chunk_size_feed_forward "
    "cls_token_id decoder_start_token_id diversity_penalty do_sample dtype early_stopping "
    "encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty "
    "finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label "
    "initializer_range is_decoder is_llama_config label2id length_penalty max_length "
    "max_sequence_length min_length model_type neftune_noise_alpha "
    "no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences "
    "output_attentions output_hidden_states output_past output_scores pad_token_id prefix "
    "pretraining_tp problem_type remove_invalid_values repetition_penalty return_dict "
    "return_dict_in_generate sep_token_id summary_activation summary_first_dropout "
    "summary_proj_to_labels summary_type summary_use_proj suppress_tokens "
    "task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype "
    "torchscript transformers.js_config transformers_version typical_p unk_token_id "
    "unsloth_fixed unsloth_version use_bfloat16 use_cache".split()
)
# Neutral fields that belong to the model and not to the file: export gives them back.
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache")

_MISSING = object()


class Fields:
    """The fields of one `config.json`; each is taken once, `finish` refuses what nobody took.

    Args:
        path: the file, for messages.
        values: its content.
        ignored: names that the user wants ignored.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], ignored: Collection[str]) -> None:
        self.path, self.values, self.ignored = path, values, ignored
        self._taken: set[str] = set()
        self._passed: set[str] = set()  # ignored where a value is compared

    def error(self, name: str, allowed: str) -> CheckpointError:
        """The refusal of a field's value."""
        found = f"is {self.values[name]!r:.100}" if name in self.values else "is missing"
        return CheckpointError(f"{self.path}: {name} {found}; allowed: {allowed}")

    def get(self, name: str, default: Any = _MISSING) -> Any:
        """A field's value of any type; `default` where it is missing.

        Raises:
            CheckpointError: it is missing and has no default.
        """
        self._taken.add(name)
        if name in self.values:
            return self.values[name]
        if default is _MISSING:
            raise self.error(name, "a value; the file has to say it")
        return default

    def _taken_as(self, name: str, default: Any, holds: Callable[[Any], bool], allowed: str) -> Any:
        value = self.get(name, default)
        if not holds(value):
            raise self.error(name, allowed)
        return value

    def whole(self, name: str, default: Any = _MISSING) -> int:
        """A positive whole number; null is taken as missing where there is a default."""
        if default is not _MISSING and self.get(name, None) is None:
            return default
        return self._taken_as(name, default, is_size, "a positive whole number")

    def number(self, name: str, default: Any = _MISSING) -> float:
        """A number >= 0."""
        return float(self._taken_as(name, default, is_number, "a number >= 0"))

    def switch(self, name: str, default: Any = _MISSING) -> bool:
        """True or false."""
        return self._taken_as(name, default, lambda v: isinstance(v, bool), "true or false")

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; empty where it is missing or null."""
        plain = (dict, type(None))
        return self._taken_as(name, None, lambda v: isinstance(v, plain), "an object or null") or {}

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse any value but these; a missing field is one of them.

        Raises:
            CheckpointError: the model computes something that ours does not.
        """
        if name in self.ignored:
            self._passed.add(name)
            return
        if name in self.values and self.get(name) not in allowed:
            raise self.error(name, " or ".join(map(str, allowed)) + " (the rest is not built)")

    def finish(self) -> None:
        """Refuse fields that were not taken and may change what the model computes.

        Raises:
            CheckpointError: naming them, or a name to ignore that changes nothing.
        """
        for name in self.ignored:
            if name not in self.values:
                raise CheckpointError(
                    f"--ignore-config-field {name}: {self.path} has no such field"
                )
            if name in self._taken - self._passed:
                raise CheckpointError(
                    f"--ignore-config-field {name}: the model is built from it; leave it out"
                )
        unknown = [
            name
            for name, value in self.values.items()
            if name not in self._taken | NEUTRAL
            and not name.startswith("_")
            and name not in self.ignored
            and value not in (None, False, {}, [])
        ]
        if unknown:
            shown = ", ".join(f"{name} = {self.values[name]!r:.60}" for name in unknown[:10])
            raise CheckpointError(
                f"{self.path}: unknown fields may change what the model computes: {shown}; "
                "give --ignore-config-field NAME for those that do not"
            )


def is_number(value: object) -> bool:
    """Tell whether a value of a JSON file is a number >= 0 that a float can hold; true is none."""
    # `json` also reads NaN and Infinity, and whole numbers of any length.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value < 1e300


def is_size(value: object) -> bool:
    """Tell whether a value is a whole number > 0 of no more than 64 bits; true is none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: it is missing, unreadable or something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # JSON, also of absurd depth, and UTF-8
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, expected an object")
    return value
