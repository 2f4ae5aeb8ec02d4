"""From this project's recipe to TE's, with names checked: TE ignores keywords it does not know."""

import dataclasses
from typing import Any

from transformer_engine.common.recipe import DelayedScaling, Format, Recipe

from megafp8.errors import PrecisionError
from megafp8.numerics import E4M3
from megafp8.numerics import Recipe as OurRecipe


def checked(recipe_class: type, **fields: Any) -> Any:
    """Construct a TE recipe.

    Raises:
        PrecisionError: a keyword that is no field of the class. TE's recipes are pydantic
            dataclasses that drop such a keyword without a word, `interval=` and typos alike.
    """
    known = {field.name for field in dataclasses.fields(recipe_class)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise PrecisionError(
            f"{recipe_class.__name__} has no field {', '.join(unknown)}; its fields are "
            f"{', '.join(sorted(known))}"
        )
    return recipe_class(**fields)


def delayed_scaling(recipe: OurRecipe, fp8_core: bool = False) -> Recipe:
    """TE's delayed scaling with our formats.

    Windows, algorithms and margins stay with the scale registry, whose memory TE's quantizers read
    and write (see `registry_quantizers.py`): of TE's own history only the staging row is left, and
    `reduce_amax` says what holds, since the registry reduces. `fp8_core` lets attention cores in an
    enabled autocast run in FP8.
    """
    assert recipe.forward_format == E4M3
    hybrid = recipe.gradient_format != E4M3
    return checked(
        DelayedScaling,
        fp8_format=Format.HYBRID if hybrid else Format.E4M3,
        margin=0,
        amax_history_len=1,
        amax_compute_algo="most_recent",
        reduce_amax=True,
        fp8_dpa=fp8_core,
        fp8_mha=False,
    )
