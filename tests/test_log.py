"""Who speaks, where to, and files of one JSON object a line."""

import json
import logging
import math

import pytest

from megafp8.errors import ConfigurationError, MegaFP8Error, TrainingError
from megafp8.log import JsonlSink, configure, get_logger


@pytest.fixture
def restored_logger():
    logger = logging.getLogger("megafp8")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before
    logging.getLogger("megafp8").manager._clear_cache()


def speak():
    get_logger("megafp8.train").info("information")
    get_logger("elsewhere").error("an error")
    get_logger("megafp8").debug("detail")


def test_rank_0_speaks_on_stderr(restored_logger, capsys):
    configure(0)
    configure(0)  # replaces, does not print twice
    speak()
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(" ", 1)[1] for line in err.splitlines()] == [
        "INFO information",
        "ERROR an error",
    ]


def test_other_ranks_speak_of_errors_only_and_name_themselves(restored_logger, capsys):
    configure(3)
    speak()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["ERROR [rank 3] an error"]


def test_all_ranks_on_request(restored_logger, capsys):
    configure(1, level=logging.DEBUG, all_ranks=True)
    speak()
    assert capsys.readouterr().err.count("[rank 1] ") == 3


def test_sink_writes_a_line_at_once_and_spells_non_finite_floats(tmp_path):
    sink = JsonlSink(tmp_path / "new" / "x.jsonl")
    sink.write({"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": (1, 2.5, None, True)})
    text = (tmp_path / "new" / "x.jsonl").read_text()
    assert text.endswith("\n")
    assert json.loads(text) == {"a": "nan", "b": ["inf", {"c": "-inf"}], "d": [1, 2.5, None, True]}
    sink.close()
    sink.close()


def test_sink_closes_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"whole": 1}\n{"cut')
    sink = JsonlSink(path)
    sink.write({"next": 1})
    sink.close()
    assert path.read_text().splitlines() == ['{"whole": 1}', '{"cut', '{"next": 1}']


def test_the_family_of_errors():
    assert issubclass(ConfigurationError, MegaFP8Error) and issubclass(MegaFP8Error, ValueError)
    assert ConfigurationError("x").exit_code == 2
    assert TrainingError("x").exit_code == 1 and isinstance(TrainingError("x"), RuntimeError)


@pytest.mark.parametrize("partly", [False, True])
def test_lines_wait_while_nothing_can_be_written(tmp_path, monkeypatch, caplog, partly):
    """A disk that is full for a while, in the middle of a line or before it."""
    sink = JsonlSink(tmp_path / "x.jsonl")
    sink.write({"a": 1})

    class Full:
        closed = False

        def __init__(self):
            self.room = 4 if partly else 0

        def write(self, content):
            if not self.room:
                raise OSError(28, "No space left on device")
            taken, self.room = self.room, 0
            return file.write(content[:taken])

    file, full = sink._file, Full()
    monkeypatch.setattr(sink, "_file", full)
    with caplog.at_level(logging.WARNING, logger="megafp8"):
        for number in (2, 3, 4):
            sink.write({"a": number})
        assert len(caplog.records) == 1 and "No space left" in caplog.text
        monkeypatch.setattr(sink, "_file", file)
        sink.write({"a": 5})
        assert "is written again; 0 lines are lost" in caplog.text
        lines = (tmp_path / "x.jsonl").read_text().splitlines()
        assert [json.loads(line)["a"] for line in lines] == [1, 2, 3, 4, 5]
        monkeypatch.setattr(sink, "_file", full)
        monkeypatch.setattr(JsonlSink, "LIMIT", 12)
        monkeypatch.setattr(full, "close", lambda: None, raising=False)
        full.room = 0
        for number in range(4):
            sink.write({"a": number})
        assert len(sink._waiting) == 18, "two lines, of which the second passed the limit"
        sink.close()
    assert "its last 4 lines are lost" in caplog.text
    file.close()
