"""Every line of `audit.jsonl` has all fields, and only rank 0 writes any."""

import json
from pathlib import Path

import pytest

from megafp8.precision.audit_log import AUDIT_NAME, FIELDS, AuditLog


def test_rows_are_complete_and_appended(tmp_path: Path) -> None:
    for iteration in (3, 4):
        audit = AuditLog(tmp_path)
        audit.write("resume", iteration, action="continue", more={"layout_after": {"tp": 2}})
        audit.close()
        audit.close()
    rows = [json.loads(line) for line in (tmp_path / AUDIT_NAME).read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [3, 4]
    for row in rows:
        assert list(row)[: len(FIELDS)] == list(FIELDS)
        assert row["layout_after"] == {"tp": 2} and row["reason"] is None
        assert (row["event"], row["level"], row["action"]) == ("resume", "info", "continue")


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path, enabled=False)
    audit.write("resume", 1)
    audit.close()
    assert list(tmp_path.iterdir()) == []


def test_a_field_that_does_not_exist_is_a_mistake(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path)
    with pytest.raises(AssertionError, match="resaon"):
        audit.write("stop", 1, resaon="SIGTERM")
    audit.close()
