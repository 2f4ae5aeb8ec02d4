"""Text to `.bin`/`.idx`, in several processes, with the same bytes for any number of them.

Records are read in order by the parent, encoded in batches by the workers and written in order by
the parent again. A record without any character but white space makes no document and is counted
as empty; a record that cannot be used stops the work, or is counted by reason if bad records are to
be skipped. Final files appear only when everything was written and read back.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import lru_cache

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megafp8.config.data import WITHOUT_MODEL
from megafp8.data.indexed_dataset import (
    IndexedDatasetWriter,
    encode_tokens,
    optimal_dtype,
)
from megafp8.data.sources import (
    DEFAULT_GLOBS,
    BadRecord,
    Inputs,
    RawRecord,
    expand_inputs,
    iterate_records,
    read_texts,
)
from megafp8.data.tokenizers import (
    Tokenizer,
    build_tokenizer,
    lost_characters,
    most_lost,
)
from megafp8.errors import DataError
from megafp8.log import get_logger

# Large enough that passing a batch between processes costs little beside encoding it (about 0.2 s
# at 5 MB/s), small enough that the bar moves and that stopping is quick.
_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 1024
# Where there is no terminal for a bar, a line this often says how far the work is.
_LOG_SECONDS = 15.0
# Texts whose lost characters are counted. It takes about as long as decoding does, and where a
# normalizer changes every text the first ones tell what is lost.
_COUNTED_TEXTS = 1000


@dataclass(frozen=True)
class PreprocessOptions:
    """How records become token ids.

    Attributes:
        tokenizer_type: One of `config.data.TOKENIZER_TYPES`.
        tokenizer_model: Model file or folder, for the types that have one.
        vocab_size: For NullTokenizer.
        json_keys: Keys of JSONL records; each gives a dataset of its own.
        append_eod: End each document with the end-of-document id.
        skip_bad_records: Count bad records and go on, instead of stopping at the first.
    """

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    skip_bad_records: bool = False


@dataclass
class PreprocessReport:
    """What was written, and what was left out.

    Attributes:
        inputs: Files that were read.
        documents: Documents written, by prefix.
        tokens: Tokens written, by prefix.
        dtype: Stored width of a token.
        empty: Empty texts left out.
        bad: Bad records left out, by reason.
        lost: Characters that do not come back from their ids.
        lossy: Texts that hold such.
        uncounted: Texts after these that come back changed.
        seconds: Time taken.
    """

    inputs: Inputs
    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    dtype: str = ""
    empty: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    lossy: int = 0
    uncounted: int = 0
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """Return the report as text."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.bad.items()))
        lines = [self.inputs.line()]
        lines += [
            f"wrote {prefix}.bin/.idx: {documents} documents, {self.tokens[prefix]} tokens, "
            f"{self.dtype}"
            for prefix, documents in self.documents.items()
        ]
        lines.append(
            f"skipped {self.empty} empty and {sum(self.bad.values())} bad records"
            f"{f' ({reasons})' if reasons else ''}; {self.seconds:.1f} s"
        )
        if self.lost:
            more = f"; {self.uncounted} more texts come back changed (not counted by character)"
            lines.append(
                f"{self.lost.total()} characters in {self.lossy} texts do not come back from their "
                f"ids: {most_lost(self.lost)}; the tokenizer has no id for them, or changes them"
                f"{more if self.uncounted else ''}"
            )
        return lines


@dataclass
class _EncodedBatch:
    """Documents of one batch, for each key: lengths in tokens and the tokens' bytes."""

    lengths: list[list[int]]
    payloads: list[bytes]
    input_bytes: int
    empty: int = 0
    bad: list[tuple[str, str, str]] = field(default_factory=list)  # place, kind, detail
    lost: Counter[str] = field(default_factory=Counter)
    lossy: int = 0
    uncounted: int = 0


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    options: PreprocessOptions,
    *,
    workers: int = 1,
    globs: Sequence[str] = DEFAULT_GLOBS,
    exclude: Sequence[str] = (),
) -> PreprocessReport:
    """Encode text files into one `<output_prefix>_<key>_document.bin/.idx` pair for each key.

    Args:
        inputs: JSONL files, plain text files, folders.
        output_prefix: Beginning of the output paths; missing folders are made.
        options: Tokenizer and treatment of records.
        workers: Processes that encode; 1 encodes in this one. The output does not depend on it.
        globs: File name patterns for folders.
        exclude: File and folder name patterns to leave out of folders.

    Returns:
        Counts, checked against the files read back from disk.

    Raises:
        DataError: Bad input, bad record, or nothing to write; no final file is then changed.
    """
    if not options.json_keys or len(set(options.json_keys)) != len(options.json_keys):
        raise DataError(f"--json-keys {' '.join(options.json_keys)}: expected distinct keys")
    kind = options.tokenizer_type
    if options.vocab_size is not None and kind != "NullTokenizer":
        raise DataError(f"--vocab-size is for --tokenizer-type NullTokenizer, found {kind}")
    started = time.monotonic()
    tokenizer = build_tokenizer(options)
    assert tokenizer is not None, "the type is named"
    for note in tokenizer.notes:
        get_logger(__name__).warning("%s", note)
    found = expand_inputs(inputs, globs, exclude)
    files = found.files
    dtype = optimal_dtype(tokenizer.vocab_size)
    report = PreprocessReport(found, dtype=dtype.name)
    prefixes = [f"{output_prefix}_{key}_document" for key in options.json_keys]
    total_bytes = sum(file.stat().st_size for file in files)
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedDatasetWriter(name, dtype)) for name in prefixes]
        batches = _encoded_batches(_batches(iterate_records(files)), options, workers, report)
        stack.enter_context(closing(batches))
        progress = stack.enter_context(closing(_with_progress(batches, total_bytes)))
        for batch in progress:
            _take(batch, writers, report, options.skip_bad_records)
        for writer in writers:
            if writer.num_documents == 0:
                raise DataError(
                    f"{writer.prefix}: no documents to write: {report.empty} empty and "
                    f"{sum(report.bad.values())} bad records in {len(files)} files"
                )
            writer.prepare()
    for prefix, writer in zip(prefixes, writers, strict=True):
        report.documents[prefix] = writer.num_documents
        report.tokens[prefix] = writer.num_tokens
    report.seconds = time.monotonic() - started
    return report


def _take(
    batch: _EncodedBatch,
    writers: Sequence[IndexedDatasetWriter],
    report: PreprocessReport,
    skip_bad_records: bool,
) -> None:
    for place, kind, detail in batch.bad:
        if not skip_bad_records:
            raise DataError(f"{place}: {detail} (--skip-bad-records leaves such records out)")
        report.bad[kind] += 1
    report.empty += batch.empty
    report.lost.update(batch.lost)
    report.lossy += batch.lossy
    report.uncounted += batch.uncounted
    for writer, lengths, payload in zip(writers, batch.lengths, batch.payloads, strict=True):
        writer.add_encoded(lengths, payload)


def _batches(records: Iterable[RawRecord]) -> Iterator[list[RawRecord]]:
    batch: list[RawRecord] = []
    size = 0
    for record in records:
        batch.append(record)
        size += _input_bytes(record)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _input_bytes(record: RawRecord) -> int:
    if record.content is not None:
        return len(record.content) + 1
    try:
        return os.stat(record.path).st_size
    except OSError:
        return 0  # gone since it was found; reading it makes it a bad record


def _encoded_batches(
    batches: Iterator[list[RawRecord]],
    options: PreprocessOptions,
    workers: int,
    report: PreprocessReport,
) -> Generator[_EncodedBatch, None, None]:
    """Yield the batches' encodings in order; `report` is that of the batches taken so far."""
    if workers == 1:
        for batch in batches:
            yield _encode_batch(batch, options, _COUNTED_TEXTS - report.lossy)
        return
    # Forking a process whose libraries have started threads can deadlock; spawn cannot.
    executor = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker
    )
    pending: deque[Future[_EncodedBatch]] = deque()
    try:
        for batch in batches:
            count = _COUNTED_TEXTS - report.lossy
            pending.append(executor.submit(_encode_batch, batch, options, count))
            # Bounds memory when writing is slower than encoding, or one batch is slow.
            if len(pending) >= 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            f"a worker process was killed (out of memory?); --workers {workers} may be too many"
        ) from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and end when the parent ends without saying so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@lru_cache(maxsize=1)
def _tokenizer_of(options: PreprocessOptions) -> Tokenizer:
    """Build the tokenizer once in each process."""
    tokenizer = build_tokenizer(options)
    assert tokenizer is not None
    return tokenizer


def _encode_batch(
    records: Sequence[RawRecord], options: PreprocessOptions, count: int
) -> _EncodedBatch:
    """Encode records; characters are counted in the first `count` texts that lose some."""
    tokenizer = _tokenizer_of(options)
    dtype = optimal_dtype(tokenizer.vocab_size)
    keys = options.json_keys
    lengths: list[list[int]] = [[] for _ in keys]
    parts: list[list[bytes]] = [[] for _ in keys]
    result = _EncodedBatch(lengths, [], sum(map(_input_bytes, records)))
    for record in records:
        try:
            texts = read_texts(record, keys)
            encoded = _encode_texts(texts, tokenizer)
        except BadRecord as error:
            result.bad.append((record.place, error.kind, error.detail))
            if not options.skip_bad_records:
                break
            continue
        for number, (text, ids) in enumerate(zip(texts, encoded, strict=True)):
            if options.tokenizer_type not in WITHOUT_MODEL and text.strip():
                back = tokenizer.decode(ids)
                if result.lossy < count:
                    lost = lost_characters(text, back)
                    result.lost.update(lost)
                    result.lossy += bool(lost)
                else:
                    result.uncounted += back != text
            if not ids:
                result.empty += 1
                continue
            if options.append_eod:
                ids.append(tokenizer.eod)
            lengths[number].append(len(ids))
            parts[number].append(encode_tokens(ids, dtype).tobytes())
    result.payloads = [b"".join(part) for part in parts]
    return result


def _encode_texts(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of each text; none for one of white space alone."""
    try:
        return [tokenizer.encode(text) if text.strip() else [] for text in texts]
    except DataError as error:
        raise BadRecord("not tokenizable", str(error)) from None


def _with_progress(
    batches: Iterator[_EncodedBatch], total_bytes: int
) -> Generator[_EncodedBatch, None, None]:
    """Pass the batches on; show a bar on a terminal, else a log line now and then."""
    console = Console(stderr=True)
    columns = (
        TextColumn("preprocess"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    logger = get_logger(__name__)
    done, logged = 0, time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("preprocess", total=total_bytes)
        for batch in batches:
            yield batch
            done += batch.input_bytes
            progress.update(bar, completed=min(done, total_bytes))
            if not console.is_terminal and time.monotonic() - logged > _LOG_SECONDS:
                logged = time.monotonic()
                logger.info("preprocess: %d of %d MB", done >> 20, total_bytes >> 20)
