"""The manifest: complete, written once, changed only by a revision that names its parent."""

import hashlib
from pathlib import Path

import pytest
import yaml

from megafp8.config import ModelShape, load_config
from megafp8.errors import PrecisionError
from megafp8.precision import build_manifest, build_plan, write_manifest
from megafp8.precision.manifest import revisions

PARITY = Path(__file__).resolve().parents[2] / "scripts" / "configs" / "parity.yaml"


def content(text: str = "") -> dict[str, object]:
    config = load_config(["--config", str(PARITY), *text.split()])
    plan = build_plan(config, ModelShape.from_config(config, 512), config.layout(1))
    return build_manifest(config, plan)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_content(tmp_path: Path) -> None:
    path = tmp_path / "manifest.yaml"
    flags = "--use-mcore-models --fp8-amax-compute-algo most_recent"
    assert write_manifest(tmp_path, content(flags)) == sha256(path)
    stored = yaml.safe_load(path.read_text())
    assert set(stored["versions"]) == {"megafp8", "python", "torch", "numpy"}
    assert all(stored["versions"].values())
    assert stored["backend"]["chosen"] == "native" and "auto" in stored["backend"]["reason"]
    assert stored["recipe"]["amax_compute_algo"] == "most_recent"
    assert stored["recipe"]["gradient_format"] == "e5m2"
    assert len(stored["plan"]["linears"]) == 16 and stored["parent"] is None
    assert stored["accepted_flags"][0]["flag"] == "--use-mcore-models"
    assert stored["compute_dtype"] == "bf16"


def test_the_same_content_writes_nothing(tmp_path: Path) -> None:
    first = write_manifest(tmp_path, content())
    path = tmp_path / "manifest.yaml"
    before = path.stat().st_mtime_ns
    assert write_manifest(tmp_path, content()) == first
    assert path.stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.yaml"]


def test_changes_are_revisions_that_name_their_parent(tmp_path: Path) -> None:
    first = write_manifest(tmp_path, content())
    second = write_manifest(tmp_path, content("--first-last-layers-bf16"))
    third = write_manifest(tmp_path, content())
    found = revisions(tmp_path)
    assert [path.name for path in found] == ["manifest.yaml", "manifest-1.yaml", "manifest-2.yaml"]
    assert [sha256(path) for path in found] == [first, second, third]
    parents = [yaml.safe_load(path.read_text())["parent"] for path in found]
    assert parents == [None, first, second]
    assert write_manifest(tmp_path, content()) == third


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    assert revisions(tmp_path) == []
    for text in ("a: [", "format: 99\n", "text"):
        (tmp_path / "manifest.yaml").write_text(text)
        with pytest.raises(PrecisionError, match="manifest.yaml: "):
            write_manifest(tmp_path, content())


def test_more_entries_may_not_replace_any() -> None:
    config = load_config(["--config", str(PARITY)])
    plan = build_plan(config, ModelShape.from_config(config, 512), config.layout(1))
    assert build_manifest(config, plan, extra={"layout": 1})["layout"] == 1
    with pytest.raises(AssertionError, match="plan"):
        build_manifest(config, plan, extra={"plan": 1})
