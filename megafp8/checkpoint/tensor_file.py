"""A tensor as `torch.save` wrote it, seen in memory without copying it.

DCP stores each shard as a `torch.save` archive inside one file. `torch.load` on a part of a file
copies the bytes several times; here they stay where the file is mapped, and are copied once, to
where they belong.
"""

import collections
import io
import pickle
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LOCAL_HEADER = 30  # bytes of a zip entry before its name; the lengths of name and extra end it


class _NotPlain(Exception):
    """The archive holds something else than one plain tensor."""


class _View(io.RawIOBase):
    """A file over memory, as much of it as `zipfile` needs."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__()
        self._memory, self._position = memory, 0

    def seekable(self) -> bool:
        """Yes."""
        return True

    def readable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._memory)}
        self._position = max(0, start[whence] + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Read what fits."""
        part = self._memory[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


class _Reader(pickle.Unpickler):
    """Reads the description of one tensor; no name in it is looked up or called."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for the few names that a plain tensor's description has."""
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _description
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise _NotPlain(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Return the storage's type, key and length."""
        kind, storage, key, _, count = pid
        if kind != "storage" or not isinstance(storage, str):
            raise _NotPlain(str(kind))
        return storage, key, count


def _description(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, *rest: Any
) -> tuple[Any, int, tuple[int, ...], tuple[int, ...]]:
    return storage, offset, tuple(size), tuple(stride)


_DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where an archive holds a plain tensor.

    Attributes:
        dtype: Of the elements.
        start: Byte of the archive at which the storage begins.
        count: Elements of the storage.
        first: Element of the storage that is the tensor's first.
        size: Of the tensor.
        stride: In elements.
    """

    dtype: torch.dtype
    start: int
    count: int
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, archive: memoryview) -> Tensor:
        """Return the tensor as a view of the archive's memory (writable, or torch warns)."""
        if 0 in self.size:
            return torch.empty(self.size, dtype=self.dtype)
        flat = torch.frombuffer(archive, dtype=self.dtype, count=self.count, offset=self.start)
        return flat.as_strided(self.size, self.stride, self.first)

    @property
    def first_byte(self) -> int | None:
        """Where in the archive its bytes begin; None if they are not in row-major order."""
        expected = 1
        for size, step in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return None
            expected *= size
        return self.start + self.first * self.dtype.itemsize


def locate_tensor(archive: memoryview) -> StoredTensor | None:
    """Return where an archive holds its tensor.

    Args:
        archive: What `torch.save` wrote.

    Returns:
        None if the archive is not that of a plain tensor in this machine's byte order, so that
        only `torch.load` knows what it is.
    """
    try:
        # zipfile reads, seeks and tells, which _View does; its stub asks for a whole IO[bytes].
        with zipfile.ZipFile(_View(archive)) as files:  # type: ignore[arg-type]
            names = {name.partition("/")[2]: name for name in files.namelist()}
            described = _Reader(io.BytesIO(files.read(names["data.pkl"]))).load()
            (storage, key, count), first, size, stride = described
            entry = files.getinfo(names[f"data/{key}"])
            order = files.read(names["byteorder"]) if "byteorder" in names else b"little"
        dtype = _DTYPES[storage]
        start = entry.header_offset + _LOCAL_HEADER
        start += sum(struct.unpack_from("<HH", archive, start - 4))  # lengths of name and extra
    except Exception:  # on damaged bytes zipfile, pickle and struct raise nearly any type
        return None
    if order != b"little" or entry.compress_type != zipfile.ZIP_STORED:
        return None
    if entry.file_size != count * dtype.itemsize or start + entry.file_size > len(archive):
        return None
    stored = StoredTensor(dtype, start, count, first, size, stride)
    if 0 in size:
        return stored
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return None if min(first, *stride, 0) < 0 or last >= count else stored


def view_tensor(archive: memoryview) -> Tensor | None:
    """Return the tensor of an archive as a view of its memory, which is not written to.

    Args:
        archive: As for `locate_tensor`; writable memory (torch warns of other).
    """
    stored = locate_tensor(archive)
    return None if stored is None else stored.view(archive)


def bytes_view(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor in row-major order, uint8 over the same memory."""
    assert tensor.is_contiguous()
    # A dimension of length 1 may have any stride, which a tensor of one value keeps when flattened,
    # and which `view` with another dtype refuses.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def buffer_of(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous tensor as a numpy array over the same memory."""
    return bytes_view(tensor).numpy()  # a buffer, which its stub does not say
