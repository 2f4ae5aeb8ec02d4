"""README and docs: links lead somewhere, nothing is left to be filled in."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_placeholders(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), f"{document.name}: {target} is not there"
    assert not re.findall(r"@[A-Z]+@|TODO|FIXME", text)


def test_files_that_the_readme_runs_are_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:scripts|tools|tests|bench)/[\w/.]+\.(?:sh|py|yaml|sbatch)", text))
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / name).is_file()]
