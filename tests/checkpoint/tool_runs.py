"""The offline tools as functions for processes that are killed; light to import."""

import itertools
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megafp8.checkpoint.offline as offline
import megafp8.convert.run as convert_run
from megafp8.checkpoint.reshard import TargetLayout, reshard_checkpoint
from megafp8.command.ending import run_tool
from megafp8.convert.run import ConvertOptions, convert

TARGET = TargetLayout(2, 1, 2)


def reshard(source: Path, save: Path) -> list[str]:
    return reshard_checkpoint(source, save, TARGET).lines()


def to_native(source: Path, save: Path) -> list[str]:
    return convert(ConvertOptions("hf", "megafp8", source, save))


def to_hf(source: Path, save: Path) -> list[str]:
    return convert(ConvertOptions("hf", "hf", source, save, max_shard_size="300KB"))


def to_megatron(source: Path, save: Path) -> list[str]:
    return convert(ConvertOptions("hf", "megatron", source, save))


TOOLS: dict[str, Callable[[Path, Path], list[str]]] = {
    function.__name__: function for function in (reshard, to_native, to_hf, to_megatron)
}


def for_ever(tool: str, source: str, root: str) -> None:
    for number in itertools.count():
        TOOLS[tool](Path(source), Path(root) / str(number) / "out")


def interrupted(tool: str, source: str, save: str, output: str) -> None:
    """Run a tool that would take long to verify, as its script does."""

    def slow(*args: Any, **kwargs: Any) -> Any:
        Path(output, "verifying").touch()
        time.sleep(60.0)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where tests run under nohup
    offline._read_back = slow
    convert_run._verify = slow
    with Path(output, "text").open("w") as file:
        sys.stdout = sys.stderr = file
        code = run_tool(lambda: TOOLS[tool](Path(source), Path(save)))
    sys.exit(code)
