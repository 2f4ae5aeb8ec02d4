"""One conversion: open, write beside the target, read back, compare, rename."""

from __future__ import annotations

import fcntl
import glob
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from megafp8.checkpoint.files import reading, sync_directory
from megafp8.checkpoint.rewrite import made_folders
from megafp8.convert.fp8_export import fp8_items, make_plan, verify_fp8, write_scales
from megafp8.convert.hf import Written, open_hf, plain_items, preferred_type, write_hf
from megafp8.convert.megatron import open_megatron, write_megatron
from megafp8.convert.native import open_native, write_native
from megafp8.convert.safetensors_files import SCALES_NAME, SafetensorsFolder
from megafp8.convert.view import (
    DTYPES,
    Checksums,
    ModelView,
    listed,
    with_padding,
)
from megafp8.errors import CheckpointError

LARGEST = 2**31 - 1  # of a number in a flag; sizes made of it fit into 64 bits
BAKED = ("static", "dynamic", "blockwise")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class ConvertOptions:
    """What the tool was asked for.

    Attributes:
        source: hf, megatron or megafp8.
        target: hf, megatron or megafp8.
        load: folder that holds the source.
        save: folder to make; it must not exist.
        dtype: of the weights written, a key of DTYPES or "keep".
        fp8: none, scales, or one of BAKED, for Hugging Face folders.
        make_vocab_size_divisible_by: padding; None for 128, or a checkpoint's own.
        seq_length: context of the configuration that is made; None chooses.
        max_shard_size: of a safetensors file, such as 5GB.
        ignore_config_fields: of `config.json`.
        config: YAML that describes a Megatron model whose checkpoint holds no settings.
    """

    source: str
    target: str
    load: Path
    save: Path
    dtype: str = "keep"
    fp8: str = "none"
    make_vocab_size_divisible_by: int | None = None
    seq_length: int | None = None
    max_shard_size: str = "5GB"
    ignore_config_fields: tuple[str, ...] = ()
    config: Path | None = None


def convert(options: ConvertOptions) -> list[str]:
    """Convert a model and verify the result.

    Returns:
        Lines that say what was converted and how it was verified.

    Raises:
        CheckpointError: nothing is left under the target's name, or beside it.
    """
    _check(options)
    final = options.save.absolute()
    if final.exists() or final.is_symlink():
        raise CheckpointError(f"--save {final} exists; give a new folder, nothing is overwritten")
    try:
        view = open_view(options)
        # Not `Path.resolve`, whose error about a loop of links is none of the system's.
        if Path(os.path.realpath(final)).is_relative_to(os.path.realpath(view.path)):
            raise CheckpointError(f"--save {final} lies inside the source {view.path}")
        # A checkpoint of ours is kept from a run's --keep-last; for others this does nothing.
        with reading(view.path), _new_folder(final) as target:
            written = _write(view, target, final, options)
            checked = _verify(view, target, written, options)
    except OSError as error:
        name = error.filename or final
        raise CheckpointError(f"{name}: {error.strerror or error}; nothing was left") from None
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise CheckpointError(
            f"{options.load}: not enough memory for one of its tensors "
            f"({str(error).splitlines()[0]}); "
            "nothing was left"
        ) from None
    count = view.shape.num_parameters
    padding = view.shape.padded_vocab_size - view.shape.vocab_size
    notes = [*view.notes, *_scales_left(view, options), *written.notes]
    return [
        *(f"note: {note}" for note in notes),
        f"converted {view.path} ({options.source}) to {final} ({written.what}): {written.tensors} "
        f"tensors, {written.bytes} bytes, {count} parameters"
        + (f" (with {padding} rows of padding)" if padding else ""),
        checked,
    ]


def _scales_left(view: ModelView, options: ConvertOptions) -> list[str]:
    """Say so where FP8 scale state stays behind."""
    kept = options.target == "megafp8" or options.fp8 in ("scales", "static")
    if kept or not view.scales:
        return []
    how = " (--fp8 scales writes it beside the weights)" if options.target == "hf" else ""
    return [f"FP8 scale state is left out: {len(view.scales)} tensors{how}"]


def _check(options: ConvertOptions) -> None:
    """Refuse combinations that say nothing."""
    if options.fp8 != "none" and options.target != "hf":
        raise CheckpointError(f"--fp8 {options.fp8} is for --to hf, found --to {options.target}")
    if options.target == "megafp8" and options.dtype not in ("keep", "fp32"):
        raise CheckpointError(
            f"--dtype {options.dtype}: megafp8 stores fp32 masters (every value of the source is "
            "kept); allowed with --to megafp8: keep, fp32"
        )
    if options.config is not None and options.source != "megatron":
        raise CheckpointError("--config describes a Megatron model; leave it out here")
    if options.config is not None:
        for name in ("seq_length", "make_vocab_size_divisible_by"):
            value = getattr(options, name)
            if value is not None:
                raise CheckpointError(
                    f"--{name.replace('_', '-')} {value}: --config {options.config} describes the "
                    f"model; give {name} there"
                )
    if options.ignore_config_fields and options.source != "hf":
        raise CheckpointError(
            f"--ignore-config-field is for --from hf, found --from {options.source}; leave it out"
        )
    for name in ("seq_length", "make_vocab_size_divisible_by"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= LARGEST:
            flag = f"--{name.replace('_', '-')}"
            raise CheckpointError(f"{flag} {value}: allowed 1 to {LARGEST}")
    if options.seq_length is not None and options.source == "megafp8":
        raise CheckpointError("--seq-length: a megafp8 checkpoint has its own; leave it out")
    _bytes(options.max_shard_size)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    unit = match.group(2).upper() if match else None
    if match is None or unit not in _UNITS or int(match.group(1)) == 0:
        raise CheckpointError(f"--max-shard-size {text}: allowed a size such as 5GB or 500MB")
    return int(match.group(1)) * _UNITS[unit]


def open_view(options: ConvertOptions) -> ModelView:
    """Open the source, its vocabulary padded as asked.

    Raises:
        CheckpointError: it is not there, damaged, or not supported.
    """
    multiple = options.make_vocab_size_divisible_by
    if options.source == "hf":
        ignored = options.ignore_config_fields
        return open_hf(options.load, options.seq_length, multiple or 128, ignored)
    if options.source == "megatron":
        return open_megatron(options.load, options.config, options.seq_length, multiple or 128)
    view = open_native(options.load)
    return view if multiple is None else with_padding(view, multiple)


@contextmanager
def _new_folder(final: Path) -> Iterator[Path]:
    """A folder beside `final` that gets its name at the end, or is deleted."""
    with made_folders(final.parent):
        for left in final.parent.glob(f".{glob.escape(final.name)}.{'[0-9a-f]' * 8}.partial"):
            with _held(left) as dead:
                if dead:  # of a conversion that was killed
                    shutil.rmtree(left)
        target = final.with_name(f".{final.name}.{os.urandom(4).hex()}.partial")
        target.mkdir()
        try:
            with _held(target):
                yield target
                sync_directory(target)
                os.rename(target, final)
                sync_directory(final.parent)
        finally:
            if target.exists():
                shutil.rmtree(target)


@contextmanager
def _held(folder: Path) -> Generator[bool, None, None]:
    """Hold a folder's lock, which ends with the process; false where that is not possible."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = True
    except OSError:
        held = False
    try:
        yield held
    finally:
        os.close(descriptor)


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def _dtype(view: ModelView, options: ConvertOptions) -> torch.dtype:
    return view.dtype if options.dtype == "keep" else DTYPES[options.dtype]


def _write(view: ModelView, target: Path, final: Path, options: ConvertOptions) -> Written:
    written = Written(Checksums(view.shape), what=options.target)
    dtype = _dtype(view, options)
    if options.target == "megafp8":
        with _bar("writing", 4 * view.shape.num_parameters) as advance:
            write_native(view, target, final, advance, written)
        return written
    exact = options.dtype == "keep"
    if options.target == "megatron":
        size = view.shape.num_parameters * dtype.itemsize
        with _bar("writing", size) as advance:
            write_megatron(view, target, dtype, exact, advance, written)
        return written
    _write_hf(view, target, dtype, options, written)
    return written


def _write_hf(
    view: ModelView, target: Path, dtype: torch.dtype, options: ConvertOptions, written: Written
) -> None:
    model_type, exact = preferred_type(view), options.dtype == "keep"
    written.what = f"{model_type}, {str(dtype).removeprefix('torch.')}"
    baked = options.fp8 in BAKED
    extra: dict[str, Any] = {}
    if baked:
        plan = make_plan(view, model_type, options.fp8)
        items = fp8_items(view, model_type, dtype, exact, written.checksums, plan)
        written.what += f", {len(plan.chosen)} linears in FP8 {options.fp8}"
        extra = plan.config()
        if dtype == torch.float32:
            written.notes.append(
                "what is not FP8 is float32, which engines may run in FP16 unless they are told "
                "another dtype; --dtype bf16 writes bfloat16"
            )
    else:
        items = plain_items(view, model_type, dtype, exact, written.checksums)
    with _bar("writing", sum(item.nbytes for item in items)) as advance:
        limit = _bytes(options.max_shard_size)
        write_hf(view, target, model_type, dtype, items, extra, limit, advance, written)
        if options.fp8 == "scales":
            count = write_scales(view, target, advance)
            written.notes.append(f"{count} tensors of FP8 scale state in {SCALES_NAME}")


def _verify_scales(
    view: ModelView, again: ModelView, target: Path, options: ConvertOptions
) -> None:
    """Compare scale state that was written as it is.

    Raises:
        CheckpointError: an entry is not the source's.
    """
    if options.target == "megafp8":
        stored, read = again.scales, again.read_scale
    elif options.fp8 == "scales":
        file = SafetensorsFolder(target, SCALES_NAME)
        stored, read = file.entries.keys(), file.read
    else:
        return
    wrong = view.scales ^ set(stored)
    if view.read_scale is not None and read is not None:
        same = view.scales & set(stored)
        wrong |= {name for name in same if not torch.equal(read(name), view.read_scale(name))}
    if wrong:
        raise CheckpointError(
            f"verification failed: read back, {len(wrong)} tensors of scale state differ: "
            f"{listed(wrong)}; nothing was left"
        )


def _verify(view: ModelView, target: Path, written: Written, options: ConvertOptions) -> str:
    """Open what was written as anyone would, and compare every value.

    Raises:
        CheckpointError: a name, a shape, a size or a value is not the source's.
    """
    multiple = view.config.model.make_vocab_size_divisible_by
    if options.fp8 in BAKED:
        model_type = preferred_type(view)
        plan = make_plan(view, model_type, options.fp8)
        return verify_fp8(view, target, model_type, plan, _dtype(view, options))
    if options.target == "hf":
        # The context is no part of a Hugging Face folder: any will do for reading it back.
        again = open_hf(target, 1, multiple, ())
    elif options.target == "megatron":
        again = open_megatron(target, None, None, multiple)
    else:
        again = open_native(target)
    names = [spec.name for spec in view.shape.parameters()]
    _verify_scales(view, again, target, options)
    found = Checksums(again.shape)
    with _bar("verifying", len(names)) as advance:
        for name in names:
            found.add(name, again.read(name))
            advance(1)
    wrong = [name for name in names if found.values[name] != written.checksums.values[name]]
    if wrong or again.shape.num_parameters != view.shape.num_parameters:
        raise CheckpointError(
            f"verification failed: read back, {len(wrong)} of {len(names)} parameters differ: "
            f"{', '.join(wrong[:5])}; nothing was left"
        )
    return (
        f"verified: all {len(names)} parameters read back equal, checksum {found.total()} of their "
        "fp32 values"
    )
