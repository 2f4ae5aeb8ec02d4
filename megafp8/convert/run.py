"""One conversion: open, write beside the target, read back, compare, rename."""

from __future__ import annotations

import fcntl
import glob
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megafp8.checkpoint.files import reading, sync_directory
from megafp8.checkpoint.offline import made_folders
from megafp8.convert.hf import export_of, open_hf, write_hf
from megafp8.convert.items import Target, bar
from megafp8.convert.megatron import open_megatron, write_megatron
from megafp8.convert.native import open_native, write_native
from megafp8.convert.safetensors_files import SCALES_NAME, SafetensorsFolder
from megafp8.convert.view import DTYPES, Checksums, ModelView, listed, with_padding
from megafp8.errors import CheckpointError

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
        fp8: none, scales, static, dynamic or blockwise, for Hugging Face folders.
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
        with reading(view.path), _new_folder(final) as folder:
            target = _write(view, folder, final, options)
            checked = _verify(target, options)
    except OSError as error:
        name = error.filename or final
        raise CheckpointError(f"{name}: {error.strerror or error}; nothing was left") from None
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise CheckpointError(
            f"{options.load}: not enough memory for one of its tensors "
            f"({str(error).splitlines()[0]}); nothing was left"
        ) from None
    count = view.shape.num_parameters
    padding = view.shape.padded_vocab_size - view.shape.vocab_size
    notes = [*view.notes, *_scales_left(view, options), *target.notes]
    return [
        *(f"note: {note}" for note in notes),
        f"converted {view.path} ({options.source}) to {final} ({target.what}): {target.tensors} "
        f"tensors, {target.bytes} bytes, {count} parameters"
        + (f" (with {padding} rows of padding)" if padding else ""),
        checked,
    ]


def _scales_left(view: ModelView, options: ConvertOptions) -> list[str]:
    """Say so where FP8 scale state stays behind."""
    if _keeps_scales(options) or options.fp8 == "static" or not view.scales:
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
    for name in ("seq_length", "make_vocab_size_divisible_by"):
        value = getattr(options, name)
        if value is not None and options.config is not None:
            raise CheckpointError(
                f"--{name.replace('_', '-')} {value}: --config {options.config} describes the "
                f"model; give {name} there"
            )
    if options.ignore_config_fields and options.source != "hf":
        raise CheckpointError(
            f"--ignore-config-field is for --from hf, found --from {options.source}; leave it out"
        )
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
def _held(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock, which ends with the process; false where that is not possible."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        held = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held = False
        yield held
    finally:
        os.close(descriptor)


def _write(view: ModelView, folder: Path, final: Path, options: ConvertOptions) -> Target:
    keep = options.dtype == "keep"
    dtype = view.dtype if keep else DTYPES[options.dtype]
    if options.target == "megafp8":  # fp32 masters whatever the compute dtype
        target = Target(view, folder, final, torch.float32, True, options.target)
        write_native(target)
        return target
    target = Target(view, folder, final, dtype, keep, options.target)
    if options.target == "megatron":
        write_megatron(target)
    else:
        write_hf(target, options.fp8, _bytes(options.max_shard_size))
    return target


def _read_back(target: Target, options: ConvertOptions) -> ModelView:
    """Open what was written as anyone would, with its scale state where that goes with it."""
    multiple = target.view.config.model.make_vocab_size_divisible_by
    asked = ConvertOptions(options.target, options.target, target.folder, target.folder)
    again = open_view(replace(asked, make_vocab_size_divisible_by=multiple))
    if options.fp8 == "scales":
        file = SafetensorsFolder(target.folder, SCALES_NAME)
        again = replace(again, scales={name: file.read(name) for name in file.entries})
    return again


def _verify(target: Target, options: ConvertOptions) -> str:
    """Compare every value that was written with the source's; return a line that says so."""
    view = target.view
    baked = export_of(view, options.fp8)
    if baked is not None:
        return baked.verify(target)
    again, failed = _read_back(target, options), "verification failed: read back, "
    wrong = view.scales.keys() ^ again.scales.keys() if _keeps_scales(options) else set()
    wrong |= {
        name
        for name in view.scales.keys() & again.scales.keys()
        if not torch.equal(view.scales[name], again.scales[name])
    }
    if wrong:
        raise CheckpointError(
            f"{failed}{len(wrong)} tensors of scale state differ: {listed(wrong)}; nothing was left"
        )
    names = [spec.name for spec in view.shape.parameters()]
    found, written = Checksums(again.shape), target.checksums.values
    with bar("verifying", len(names)) as advance:
        for name in names:
            found.add(name, again.read(name))
            advance(1)
    lost = [name for name in names if found.values[name] != written[name]]
    if lost or again.shape.num_parameters != view.shape.num_parameters:
        raise CheckpointError(
            f"{failed}{len(lost)} of {len(names)} parameters differ: {', '.join(lost[:5])}; "
            "nothing was left"
        )
    return (
        f"verified: all {len(names)} parameters read back equal, checksum {found.total()} of their "
        "fp32 values"
    )


def _keeps_scales(options: ConvertOptions) -> bool:
    return options.target == "megafp8" or options.fp8 == "scales"
