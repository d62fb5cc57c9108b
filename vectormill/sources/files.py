"""File sources: rows of JSONL, CSV and Parquet files in any fsspec store, and files of a folder."""

import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from vectormill.domain.errors import InvalidSubmission, SourceFailed, SourceInterrupted
from vectormill.extras import compose_install
from vectormill.files.formats import describe_inputs
from vectormill.files.parquet import open_parquet
from vectormill.jobs.item import Item
from vectormill.rows.decoding import PARQUET, read_rows
from vectormill.rows.inputs import TextTree, find_format
from vectormill.sources.reader import MOST_BYTES, MOST_ROWS, Reader, SourceAssembler, SourcePlace
from vectormill.sources.source import LOCAL, FileOptions, TreeOptions
from vectormill.webhooks.webhook import refuse_address

# Protocols of real stores that connect only to hosts that the operator configured, or whose connections are checked.
# ftp, sftp, hdfs, webhdfs and smb connect to wherever a name leads by then, or a server redirects them. Archives and
# chained protocols would be a way around the folder that local files must lie in.
STORES: Final = (
    "file", "local", "memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "http", "https", "hf", "oss",
    "oci",
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


class FileReader(Reader):
    """Read files in order of pattern and then of name. A file that matches two patterns is read once."""

    def __init__(self, options: FileOptions, place: SourcePlace) -> None:
        super().__init__()
        self._options = options
        self._place = place

    def read(self) -> Iterator[Sequence[Item]]:
        for store, path in find_files(self._options.files, self._place):
            settings, format = self._place.settings, self._choose_format(path)
            assembler = SourceAssembler(path, settings.max_key_bytes, self.complaints)
            choose = self._options.item_columns.find
            try:
                stamp = read_stamp(store, path)
                with open_bytes(store, path, self._place) as file:
                    bounds = (settings.max_line_bytes, settings.max_gzip_ratio)
                    for batch in read_rows(file, format, choose, path, *bounds):
                        items = assembler.assemble_batch(batch)
                        for start in range(0, len(items), MOST_ROWS):
                            yield items[start : start + MOST_ROWS]
                if read_stamp(store, path) != stamp:
                    raise SourceInterrupted(
                        f"{path} was changed while it was being read, so the rows may be incomplete. "
                        "Write changes to a new file and rename it into place."
                    )
            except SourceFailed:
                raise
            except InvalidSubmission as error:
                raise SourceFailed(str(error)) from error
            except Exception as error:
                raise SourceFailed(describe_failure(path, error)) from error

    def count_rows(self) -> int | None:
        """Return the total number of rows that Parquet files state; None for other formats."""
        num_rows = 0
        for store, path in islice(find_files(self._options.files, self._place), 1000):
            if self._choose_format(path) != PARQUET:
                return None
            try:
                with open_bytes(store, path, self._place) as file, open_parquet(file) as table:
                    num_rows += table.num_rows
            except Exception:  # noqa: BLE001 - the number is optional, and reading reports the error
                return None
        return num_rows

    def _choose_format(self, path: str) -> str:
        format = self._options.format or find_format(path)
        if format is None:
            raise SourceFailed(
                f"Unknown format of {path}: use a name ending in {describe_inputs()}, or set the format."
            )
        return format


def find_files(patterns: Iterable[str], place: SourcePlace) -> Iterator[tuple[Any, str]]:
    """Yield the files of all patterns, each once, with their stores.

    Raise SourceFailed if a pattern matches no file: missing files must not count as an empty source, which would
    delete every row.
    """
    known: set[str] = set()
    for pattern in patterns:
        store, name = open_store(pattern, place)
        try:
            found = sorted(store.glob(name))
        except Exception as error:
            raise SourceFailed(describe_failure(pattern, error)) from error
        if not found:
            raise SourceFailed(f"No file matches {pattern} on the machine that reads the source.")
        for path in found:
            if path not in known:
                known.add(path)
                yield store, path


def open_store(name: str, place: SourcePlace) -> tuple[Any, str]:
    """Return the file system of a path, glob or URL, and its name there. Raise SourceFailed."""
    protocol = name.partition("://")[0] if "://" in name else "file"
    if "::" in name or protocol not in (*STORES, *place.settings.list_unguarded_sources()):
        raise SourceFailed(
            f"Sources cannot be read from {name!r}; the supported protocols are {', '.join(STORES)}. Others, whose "
            "connections are not checked, need an entry in VECTORMILL_UNGUARDED_SOURCES of the API and the indexer."
        )
    if protocol in LOCAL:
        path, roots = Path(name.removeprefix(f"{protocol}://")), place.roots
        roots.find(path)
        return LocalFileSystem(), str(roots.folders[0] / path)
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


async def make_guarded_session(**options: Any) -> Any:
    """Create the HTTP session for fsspec, which connects to no address where a cloud hands out credentials.

    The address of each connection is checked, so that neither a redirect nor a changed DNS record gets around
    the check. Private addresses are allowed, because files are often stored there.
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


def open_bytes(store: Any, path: str, place: SourcePlace) -> BinaryIO:
    """Open a file for reading; a local one without fsspec, which leaves it open after a text reader is closed."""
    if not isinstance(store, LocalFileSystem):
        return cast("BinaryIO", store.open(path, "rb"))
    return place.roots.open_file(Path(path))


def describe_failure(name: str, error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return f"{name} cannot be read: {words.rstrip('.')}."


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
        self._roots = place.roots

    def read(self) -> Iterator[Sequence[Item]]:
        """Yield the documents. Raise SourceFailed if no file matches: the folder may not be mounted."""
        _, folder = self._roots.find(Path(self._options.folder))
        if not folder.is_dir():
            raise SourceFailed(f"There is no folder {folder} on the machine that reads the source.")
        tree = TextTree(folder)
        assembler = SourceAssembler(str(tree.root), self._place.settings.max_key_bytes, self.complaints)
        keys: list[str] = []
        texts: list[str] = []
        num_bytes = num_files = 0
        for path in self._find_files(tree):
            try:
                with self._roots.open_file(path) as file:
                    document = tree.read(path, file, MOST_BYTES)
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

    def _find_files(self, tree: TextTree) -> Iterator[Path]:
        is_included, is_excluded = make_filter(self._options.include), make_filter(self._options.exclude)

        def fail(error: OSError) -> None:
            raise SourceFailed(f"{error.filename} cannot be read: {error.strerror}.") from error

        for path in tree.find_files(fail):
            name = os.fspath(path.relative_to(tree.root)).replace(os.sep, "/")
            # RowReading a pipe would block, and a device file has no end.
            is_chosen = is_included(name) and not is_excluded(name) and path.is_file()
            if is_chosen and (not self._roots.is_private(path) or self._roots.is_private(tree.root)):
                yield path


def make_filter(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return a function that says whether a path relative to the folder matches one of the patterns."""
    translated = [glob_translate(pattern if "/" in pattern else f"**/{pattern}") for pattern in patterns]
    fits = [re.compile(pattern) for pattern in translated]
    return lambda name: any(pattern.match(name) for pattern in fits)
