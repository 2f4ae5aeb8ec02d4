"""One planted mistake."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A planted mistake.

    Attributes:
        name: unique.
        file: below the repository's root.
        before, after: the text that is replaced.
        breaks: what a run would do wrong.
        tests: what has to fail, as pytest takes it; below `tests/`.
        survives: why no test fails; empty where one does.
    """

    name: str
    file: str
    before: str
    after: str
    breaks: str
    tests: tuple[str, ...]
    survives: str = ""
