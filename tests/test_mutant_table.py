"""The table of mutants fits the code: each text is there once, each test is there."""

import re

from tests.tools.mutant_table import MUTANTS
from tests.tools.mutants import ROOT

LAYOUTS = (ROOT / "tests/support/layouts.py").read_text(encoding="utf-8")


def test_each_text_occurs_once_and_is_changed() -> None:
    texts = {mutant.file: (ROOT / mutant.file).read_text(encoding="utf-8") for mutant in MUTANTS}
    stale = [m.name for m in MUTANTS if texts[m.file].count(m.before) != 1]
    assert not stale, f"give these the text that the code has now: {stale}"
    changed = {(m.file, texts[m.file].replace(m.before, m.after)) for m in MUTANTS}
    assert len(changed) == len({m.name for m in MUTANTS}) == len(MUTANTS) >= 60
    assert not changed & texts.items()
    for file, text in changed:
        compile(text, file, "exec")


def test_each_test_exists() -> None:
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            name, _, case = function.partition("[")
            assert re.search(rf"^def {name or 'test_'}", text, re.M), f"{mutant.name}: {test}"
            # Names of layouts are made of `LayoutCase.name`, in another file.
            assert case.rstrip("]") in text + LAYOUTS, f"{mutant.name}: {test}"
