"""What all sections of the configuration share: the model settings and the bounded number types."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """One section of the configuration: frozen, no unknown names, no quiet conversions.

    `strict` keeps `True` from passing as the integer 1 and "8" as 8 when a configuration is built
    from Python; text from the command line and from YAML is converted before, in `text.py`. Fields
    that hold a tuple are `strict=False`: YAML and JSON, in which checkpoints keep them, have lists.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]
