"""`RunConfig`: everything a run was asked to do, validated once and never changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError, field_validator, model_validator

from megafp8.config.axes import smallest_world
from megafp8.config.checks import problems
from megafp8.config.data import BYTE_TOKENIZER_SIZE
from megafp8.config.layout import Layout, build_layout, full_batch_size
from megafp8.config.messages import sentence
from megafp8.config.names import to_user_keys
from megafp8.config.sections import Sections
from megafp8.errors import ConfigurationError


class RunConfig(Sections):
    """One run. Sections hold what the user said; what follows from it is a property or a method."""

    @field_validator("accepted_flags")
    @classmethod
    def _flags_are_unique(cls, flags: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(flags))

    @model_validator(mode="after")
    def _fields_agree(self) -> RunConfig:
        for problem in problems(self):
            raise ConfigurationError(problem)
        return self

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], where: Mapping[tuple[str, str], str] | None = None
    ) -> RunConfig:
        """Validate nested values (section -> field -> value).

        Args:
            values: Typed values; text such as "8" for an integer is refused.
            where: For error messages, where each (section, field) was given.

        Raises:
            ConfigurationError: One line: every field that is wrong, else the first contradiction.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigurationError(sentence(error, where or {})) from None

    def layout(self, world_size: int) -> Layout:
        """Return the grid of ranks for a world size.

        Raises:
            ConfigurationError: The degrees or the batch do not fit, with the equation.
        """
        return build_layout(self.model, self.parallel, self.training, world_size)

    def resolved(self, world_size: int) -> RunConfig:
        """Return this configuration with the default that depends on the world size filled in.

        Everything after the launcher reads `global_batch_size` as a number.
        """
        layout = self.layout(world_size)
        if self.training.global_batch_size is not None:
            return self
        size = full_batch_size(self.training, layout.dp)
        training = self.training.model_copy(update={"global_batch_size": size})
        return self.model_copy(update={"training": training})

    @property
    def smallest_world_size(self) -> int:
        """Fewest processes that the degrees of parallelism allow."""
        return smallest_world(self.parallel)

    @property
    def known_vocab_size(self) -> int | None:
        """Tokens before padding where the flags alone tell it, else None."""
        size, kind = self.data.vocab_size, self.data.tokenizer_type
        if kind == "ByteTokenizer":
            return BYTE_TOKENIZER_SIZE if size is None else size
        if size is None:
            return None
        # As in Megatron, its end-of-document id comes on top.
        return size + 1 if kind == "NullTokenizer" else size

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the values as a YAML file would give them, without those that are None.

        Negative switches appear under their flag's name (`no_fp8_wgrad`), so reading the result
        gives an equal configuration.
        """
        return to_user_keys(self)
