"""File sources: rows of JSONL, CSV and Parquet files in any fsspec store, and files of a folder."""

import csv
import gzip
import io
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, cast
from urllib.parse import urlsplit

import fsspec
import msgspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from vectormill.domain.errors import SourceFailed, SourceInterrupted
from vectormill.extras import compose_install
from vectormill.files.formats import INPUT_FORMATS, by_suffix, describe_inputs
from vectormill.files.texts import MAX_FIELD_CHARS, TextTree
from vectormill.jobs.item import Item
from vectormill.sources.reader import MOST_BYTES, Assembler, BatchSize, Reader, SourcePlace
from vectormill.sources.source import LOCAL, FileOptions, PickedColumns, TreeOptions, hide_queries
from vectormill.webhooks.targets import refuse_address


def check_local(path: Path, root: Path | None) -> Path:
    """Return the full path of a local file; a relative path starts at the root.

    Raise SourceFailed if the file is not below the root once links are resolved, or if a path is relative and no
    root is set.
    """
    if root is None:
        if not path.is_absolute():
            raise SourceFailed(
                f"{path} is a relative path, whose meaning depends on the process; use an absolute path, or set "
                "VECTORMILL_SOURCE_ROOT."
            )
        return path
    start = root.expanduser().resolve()
    whole = start / path
    if not whole.resolve().is_relative_to(start):
        raise SourceFailed(
            f"{path} is not below {start}, the only allowed folder for sources (VECTORMILL_SOURCE_ROOT)."
        )
    return whole


FORMAT_OF_SUFFIX: Final = by_suffix(INPUT_FORMATS)
PACKED: Final = (".gz", ".zst")
# Protocols of real stores only. Archives, caches and chained protocols would be a way around the folder that
# local files must lie in.
STORES: Final = (
    "file", "local", "memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "http", "https", "ftp",
    "sftp", "ssh", "hdfs", "webhdfs", "hf", "oss", "oci", "smb",
)  # fmt: skip

# Fields that change with a file's content, as the various stores name them.
STAMPS: Final = (
    "size",
    "mtime",
    "ino",
    "ETag",
    "etag",
    "LastModified",
    "last_modified",
    "updated",
    "generation",
)
# Protocols whose URL contains the host that is connected to.
OF_MACHINES: Final = ("http", "https", "ftp", "sftp", "ssh", "hdfs", "webhdfs", "smb")

COLUMN: Final = re.compile(r"[\w .()%/-]{1,64}")
PARQUET_ROWS: Final = 4096
# The line breaks of a file that is read without newline translation.
LINE_BREAK: Final = re.compile(r"\r\n|\r|\n")


class FileReader(Reader):
    """Read files in order of pattern and then of name. A file that matches two patterns is read once."""

    def __init__(self, options: FileOptions, place: SourcePlace) -> None:
        super().__init__()
        self._options = options
        self._place = place

    def read(self) -> Iterator[Sequence[Item]]:
        for store, path in self._find_files():
            assembler = Assembler(hide_queries(path), self._place.settings.max_key_bytes, self.complaints)
            try:
                stamp = read_stamp(store, path)
                for columns in self._read_columns(store, path):
                    yield assembler.assemble(*columns)
                if read_stamp(store, path) != stamp:
                    raise SourceInterrupted(
                        f"{hide_queries(path)} was changed while it was being read, so the rows may be incomplete. "
                        "Write changes to a new file and rename it into place."
                    )
            except SourceFailed:
                raise
            except Exception as error:
                raise SourceFailed(describe_failure(path, error)) from error

    def count_rows(self) -> int | None:
        """Return the total number of rows that Parquet files state; None for other formats."""
        import pyarrow.parquet  # imported here because this takes 0.1 s

        num_rows = 0
        for store, path in islice(self._find_files(), 1000):
            if self._choose_format(path) != "parquet":
                return None
            try:
                with open_bytes(store, path) as file, pyarrow.parquet.ParquetFile(file) as table:
                    num_rows += table.metadata.num_rows
            except Exception:  # noqa: BLE001 - the number is optional, and reading reports the error
                return None
        return num_rows

    def _find_files(self) -> Iterator[tuple[Any, str]]:
        """Yield the files of all patterns.

        Raise SourceFailed if a pattern matches no file: missing files must not count as an empty source,
        which would delete every row.
        """
        known: set[str] = set()
        for pattern in self._options.files:
            store, name = open_store(pattern, self._place.settings.source_root)
            try:
                found = sorted(store.glob(name))
            except Exception as error:
                raise SourceFailed(describe_failure(pattern, error)) from error
            if not found:
                raise SourceFailed(
                    f"No file matches {hide_queries(pattern)} on the machine that reads the source."
                )
            for path in found:
                if isinstance(store, LocalFileSystem):
                    check_local(Path(path), self._place.settings.source_root)
                if path not in known:
                    known.add(path)
                    yield store, path

    def _choose_format(self, path: str) -> str:
        suffixes = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
        if suffixes and suffixes[-1] in PACKED:
            suffixes.pop()
        format = self._options.format or FORMAT_OF_SUFFIX.get(suffixes[-1] if suffixes else "")
        if format is None:
            raise SourceFailed(
                f"Unknown format of {path}: use a name ending in {describe_inputs(' or '.join(PACKED))}, or set the "
                "format."
            )
        return format

    def _read_columns(self, store: Any, path: str) -> Iterator[PickedColumns]:
        format = self._choose_format(path)
        with open_bytes(store, path) as raw:
            if format == "parquet":
                yield from read_parquet(raw, path, self._options)
                return
            with unpacked(raw, path) as file:
                if format == "jsonl":
                    max_line_bytes = self._place.settings.max_line_bytes
                    for rows in read_json_lines(file, path, max_line_bytes):
                        for name in (self._options.key, *self._options.texts):
                            if name not in rows[0]:
                                raise no_column(path, name, list(rows[0]))
                        yield choose_columns(rows, self._options)
                else:
                    yield from read_csv(file, path, "," if format == "csv" else "\t", self._options)


def open_store(name: str, root: Path | None) -> tuple[Any, str]:
    """Return the file system of a path, glob or URL, and its name there. Raise SourceFailed."""
    protocol = name.partition("://")[0] if "://" in name else "file"
    if "::" in name or protocol not in STORES:
        raise SourceFailed(
            f"Sources cannot be read from {name!r}; the supported protocols are {', '.join(STORES)}."
        )
    if protocol in LOCAL:
        return LocalFileSystem(), str(check_local(Path(name.removeprefix(f"{protocol}://")), root))
    if protocol in OF_MACHINES:
        refuse_machine(name)
    options = {"get_client": make_guarded_session} if protocol in ("http", "https") else {}
    try:
        return cast("tuple[Any, str]", fsspec.url_to_fs(name, **options))
    except ImportError as error:
        raise SourceFailed(
            f"{name!r} needs a package that is not installed ({error}). `{compose_install('fsspec')}` installs those "
            "for S3 and HTTP; Google Cloud Storage needs gcsfs, Azure adlfs."
        ) from error
    except Exception as error:
        raise SourceFailed(describe_failure(name, error)) from error


def refuse_machine(name: str) -> None:
    """Raise SourceFailed for a URL whose host is a cloud's metadata service, which hands out credentials.

    Private addresses are allowed, because files are often stored there. Redirects are checked by
    `make_guarded_session`.
    """
    host = urlsplit(name).hostname or ""
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:  # the host has no address; opening the file reports that
        return
    for address in sorted(addresses):
        reason = refuse_address(address, allows_private=True)
        if reason is not None:
            raise SourceFailed(f"Sources cannot be read from the host {host}: {reason}")


async def make_guarded_session(**options: Any) -> Any:
    """Create the HTTP session for fsspec, which refuses the same addresses as `refuse_machine`.

    The address of each connection is checked, so that neither a redirect nor a changed DNS record gets around
    the check.
    """
    import aiohttp

    def make_socket(found: Any) -> socket.socket:
        family, kind, protocol, _, address = found
        reason = refuse_address(str(address[0]), allows_private=True)
        if reason is not None:
            raise SourceFailed(f"Refused to connect to {address[0]}: {reason}")
        return socket.socket(family, kind, protocol)

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=make_socket), **options)


def read_stamp(store: Any, path: str) -> dict[str, Any]:
    """Return those of the store's current properties of a file that change with its content."""
    store.invalidate_cache(path)
    found = store.info(path)
    return {name: found[name] for name in STAMPS if name in found}


def open_bytes(store: Any, path: str) -> BinaryIO:
    """Open a file for reading; a local one without fsspec, which leaves it open after a text reader is closed."""
    if not isinstance(store, LocalFileSystem):
        return cast("BinaryIO", store.open(path, "rb"))
    if not Path(path).is_file():
        raise SourceFailed(
            f"{path} is not a regular file: a pipe would block for ever, and a device has no end."
        )
    return Path(path).open("rb")


def unpacked(raw: Any, path: str) -> BinaryIO:
    if path.endswith(".gz"):
        return cast("BinaryIO", gzip.open(raw, "rb"))
    if path.endswith(".zst"):
        import pyarrow  # unlike zstandard's reader, this one rejects a truncated file

        return cast("BinaryIO", pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd"))
    return cast("BinaryIO", raw)


def read_csv(file: BinaryIO, path: str, delimiter: str, options: FileOptions) -> Iterator[PickedColumns]:
    """Yield batches of columns. A row with invalid UTF-8 gets lone surrogates, so that it alone fails."""
    csv.field_size_limit(MAX_FIELD_CHARS)
    with io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as content:
        rows = csv.reader(content, delimiter=delimiter, strict=True)
        header = next(rows, None)
        if header is None:
            raise SourceFailed(f"{hide_queries(path)} is empty; its first line should name the columns.")
        positions = find_positions(header, options, path)
        size = BatchSize()
        while True:
            num_lines = rows.line_num
            batch: list[list[str]] = []
            try:
                batch.extend(islice(rows, size.rows))
            except csv.Error as error:  # rows that were read before the error are in the batch
                line = num_lines + count_lines(batch) + 1
                raise SourceFailed(
                    f"{hide_queries(path)}, in the row that begins at line {line}: {error}."
                ) from error
            if not batch:
                return
            if {len(row) for row in batch} != {len(header)}:
                check_widths(batch, len(header), path, num_lines + 1)
                batch = [row for row in batch if row]  # skips empty lines
                if not batch:
                    continue
            values = list(zip(*batch, strict=True))
            texts = positions[1 : len(options.texts) + 1]
            size.learn_bytes(len(batch), sum(sum(map(len, values[position])) for position in texts))
            yield options.pick(values, positions)


def check_widths(batch: Sequence[Sequence[str]], width: int, path: str, line: int) -> None:
    """Raise SourceFailed if a row does not have `width` cells. The first row begins at line `line`."""
    for number, row in enumerate(batch):
        if row and len(row) != width:
            at = line + count_lines(batch[:number])
            raise SourceFailed(
                f"{hide_queries(path)}, line {at}: the row has {len(row)} cells, but the header has {width}."
            )


def count_lines(rows: Sequence[Sequence[str]]) -> int:
    """Return the number of lines that rows take up in their file.

    This is one each, plus one for every line break in a cell.
    """
    return len(rows) + sum(len(LINE_BREAK.findall(cell)) for row in rows for cell in row)


def read_parquet(file: Any, path: str, options: FileOptions) -> Iterator[PickedColumns]:
    """Yield the columns of a Parquet file by row group. One compressed row group is held in memory."""
    import pyarrow.parquet  # imported here because this takes 0.1 s

    with pyarrow.parquet.ParquetFile(file) as table:
        names = table.schema_arrow.names
        positions = find_positions(names, options, path)
        wanted = [names[position] for position in positions]
        for batch in table.iter_batches(PARQUET_ROWS, columns=wanted):
            num_rows = max(1, batch.num_rows * MOST_BYTES // max(batch.nbytes, 1))
            for start in range(0, batch.num_rows, num_rows):
                part = batch.slice(start, num_rows)
                values = [part.column(name).to_pylist() for name in wanted]
                yield options.pick(values, range(len(wanted)))


def choose_columns(rows: list[dict[str, Any]], options: FileOptions) -> PickedColumns:
    def column(name: str | None) -> list[Any] | None:
        return [row.get(name) for row in rows] if name else None

    metadata = column(options.metadata_json)
    if options.metadata:
        metadata = [{name: row.get(name) for name in options.metadata} for row in rows]
    return column(options.key) or [], column(options.text) or [], metadata, column(options.text_pair)


def find_positions(names: Sequence[str], options: FileOptions, path: str) -> list[int]:
    """Return the positions of the key, text and metadata columns. Raise SourceFailed if one is missing."""
    for name in options.columns:
        if name not in names:
            raise no_column(path, name, names)
    return [list(names).index(name) for name in options.columns]


def no_column(path: str, name: str, names: Sequence[str]) -> SourceFailed:
    return SourceFailed(f"{hide_queries(path)} has no column {name!r}; its columns are {show(names)}.")


def show(names: Sequence[str]) -> str:
    """List column names for a message. Names that look like content of the file are only counted."""
    known = [repr(name) for name in names if COLUMN.fullmatch(name)][:20]
    if len(known) < len(names):
        known.append(f"{len(names) - len(known)} more")
    return ", ".join(known) or "none"


def describe_failure(name: str, error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return hide_queries(f"{name} cannot be read: {words.rstrip('.')}.")


BLOCK_BYTES: Final = 1 << 20
ROW_DECODER: Final = msgspec.json.Decoder(dict[str, Any])
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def read_json_lines(file: BinaryIO, name: str, max_line_bytes: int) -> Iterator[list[dict[str, Any]]]:
    """Yield batches of JSON objects, one per line and never an empty batch.

    Raise SourceFailed, with the line's number, for a line that is not a JSON object. Such a line is not
    skipped: its key is unknown, so its row would be deleted as missing from the source.
    """
    rest = b""
    num_lines = 0
    while block := file.read(BLOCK_BYTES):
        if num_lines == 0 and not rest:
            block = block.removeprefix(BYTE_ORDER_MARK)
        lines, newline, rest_of_block = block.rpartition(b"\n")
        if not newline:
            rest += block
            if len(rest) > max_line_bytes:
                raise SourceFailed(
                    f"{name}, line {num_lines + 1}: more than {max_line_bytes} bytes (VECTORMILL_MAX_LINE_BYTES)."
                )
            continue
        whole, rest = rest + lines, rest_of_block
        if rows := decode_lines(whole, name, num_lines):
            yield rows
        num_lines += whole.count(b"\n") + 1
    if rows := decode_lines(rest, name, num_lines):
        yield rows


def decode_lines(lines: bytes, name: str, num_before: int) -> list[dict[str, Any]]:
    """Decode lines into JSON objects. `num_before` lines of the file come before these."""
    try:
        return ROW_DECODER.decode_lines(lines)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        numbered = enumerate(lines.split(b"\n"), start=num_before + 1)
        return [decode_line(line, f"{name}, line {number}") for number, line in numbered if line.strip()]


def decode_line(line: bytes, place: str) -> dict[str, Any]:
    """Decode one line. Keep invalid UTF-8 and lone surrogates in the text, so that only its item fails."""
    try:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise SourceFailed(f"{place}: not valid JSON ({reason}).") from error
    except RecursionError as error:
        raise SourceFailed(f"{place}: the JSON is nested too deeply.") from error
    if not isinstance(row, dict):
        raise SourceFailed(f"{place}: expected a JSON object with a key and a text.")
    return row


# The number is small, because files may be long and the first batch is ready only after this many files.
BATCH_FILES: Final = 512


class TreeReader(Reader):
    """Read the visible files of a folder in order of path, and of each at most MOST_BYTES.

    The modification time is not part of the metadata: otherwise every row would count as changed in a copy of
    the folder.
    """

    def __init__(self, options: TreeOptions, place: SourcePlace) -> None:
        super().__init__()
        self._options = options
        self._place = place

    def read(self) -> Iterator[Sequence[Item]]:
        """Yield the documents. Raise SourceFailed if no file matches: the folder may not be mounted."""
        tree = TextTree(self._find_folder())
        assembler = Assembler(str(tree.root), self._place.settings.max_key_bytes, self.complaints)
        keys: list[str] = []
        texts: list[str] = []
        num_bytes = num_files = 0
        for path in self._find_files(tree):
            try:
                document = tree.read(check_local(path, self._place.settings.source_root), MOST_BYTES)
            except FileNotFoundError:  # the file was removed after the folder was listed
                continue
            except OSError as error:
                raise SourceFailed(f"{path} cannot be read: {error.strerror}.") from error
            num_files += 1
            keys.append(path.relative_to(tree.root).as_posix())
            texts.append(document["text"])
            num_bytes += len(document["text"])
            if len(keys) >= BATCH_FILES or num_bytes >= MOST_BYTES:
                yield assembler.assemble(keys, texts, [{"path": key} for key in keys])
                keys, texts, num_bytes = [], [], 0
        if keys:
            yield assembler.assemble(keys, texts, [{"path": key} for key in keys])
        if num_files == 0:
            raise SourceFailed(
                f"{tree.root} contains no matching file ({', '.join(self._options.include)}); is it mounted on the "
                "machine that reads the source?"
            )

    def _find_folder(self) -> Path:
        folder = check_local(Path(self._options.folder), self._place.settings.source_root)
        if not folder.is_dir():
            raise SourceFailed(f"There is no folder {folder} on the machine that reads the source.")
        return folder

    def _find_files(self, tree: TextTree) -> Iterator[Path]:
        is_included, is_excluded = make_filter(self._options.include), make_filter(self._options.exclude)

        def fail(error: OSError) -> None:
            raise SourceFailed(f"{error.filename} cannot be read: {error.strerror}.") from error

        for path in tree.find_files(fail):
            name = os.fspath(path.relative_to(tree.root)).replace(os.sep, "/")
            # Reading a pipe would block, and a device file has no end.
            if is_included(name) and not is_excluded(name) and path.is_file():
                yield path


def make_filter(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return a function that says whether a path relative to the folder matches one of the patterns."""
    translated = [glob_translate(pattern if "/" in pattern else f"**/{pattern}") for pattern in patterns]
    fits = [re.compile(pattern) for pattern in translated]
    return lambda name: any(pattern.match(name) for pattern in fits)
