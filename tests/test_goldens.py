"""What `tests/golden/` holds still holds, and the comparison can fail."""

import copy
import subprocess
import sys

import pytest

from megafp8.launch.main import main
from tests.tools.goldens import BOUND, ROOT, TEXTS, differences, read_stored


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(list(TEXTS[name]), {}) == 0
    assert capsys.readouterr().out == read_stored()[1][f"text/{name}"]


def test_a_difference_is_found_and_named() -> None:
    _, stored = read_stored()
    assert list(differences(stored, stored, exactly=True)) == []
    other = copy.deepcopy(stored)
    loss = float(other["losses/delayed/tp2"][7][0])
    other["losses/delayed/tp2"][7][0] = repr(loss * (1 + BOUND / 2))
    other["files/hf"]["config.json"] = "0"
    other["text/help"] = other["text/help"].replace("--lr ", "--rate ", 1)
    found = list(differences(stored, other, exactly=True))
    assert [line.split(": ")[:2] for line in found[:2]] == [
        ["files/hf", "1 of 2 differ, the first config.json"],
        ["losses/delayed/tp2", "iteration 8"],
    ]
    assert len(found) == 3 and "--rate" in found[2]
    # On another kind of CPU a loss may be a little away, and no digest counts.
    assert [line.split(":")[0] for line in differences(stored, other, exactly=False)] == [
        "text/help"
    ]
    other["losses/delayed/tp2"][7][0] = repr(loss * (1 + 2 * BOUND))
    assert len(list(differences(stored, other, exactly=False))) == 2
    del other["losses/delayed/tp2"][-1]
    assert "99" in "".join(differences(stored, other, exactly=False))


@pytest.mark.slow
def test_all_of_it_is_the_same() -> None:
    command = [sys.executable, "tests/tools/goldens.py"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
