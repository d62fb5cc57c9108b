"""Store: the objects of S3, Google Cloud Storage, Azure Blob Storage or a local folder, by URL.

Credentials, regions and endpoints come from the environment of each process, by the variables that obstore
reads (https://developmentseed.org/obstore/latest/authentication/): AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so
on. They are never sent to the API and never stored.
"""

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import lt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vectormill.domain.errors import InvalidOption, ObjectChanged, StorageUnavailable
from vectormill.files.roots import WILD, Roots

if TYPE_CHECKING:
    from typing_extensions import Buffer

SCHEMES: Final = ("s3", "gs", "az", "file")
DESCRIBED: Final = "s3://bucket/…, gs://bucket/…, az://container/… or file:///folder/…"
# A query of a URL, unlike the ? of a pattern.
QUERY: Final = re.compile(r"\?[^/?&=*\[]+=")
LISTED_AT_ONCE: Final = 1000
LOCAL: Final = "file://"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object at one moment. Its entity tag changes whenever its content does."""

    url: str
    num_bytes: int
    tag: str
    modified_at: float  # seconds since the epoch


def normalize(url: str) -> str:
    """Return the URL of an object, a folder or a pattern, without a slash at the end; an absolute path gets file://.

    Raise InvalidOption for any other scheme, and for a relative path, which would mean another file in each process.
    """
    scheme, mark, path = url.partition("://")
    if not mark:
        if not url.startswith("/"):
            raise InvalidOption(
                f"{url!r} is not the URL of an object; write {DESCRIBED}, or an absolute path."
            )
        scheme, path = "file", url
    if scheme not in SCHEMES:
        raise InvalidOption(f"Unknown store {scheme!r} in {url!r}; write {DESCRIBED}.")
    parts = path.split("/")
    if scheme == "file" and parts[0]:
        raise InvalidOption(f"{url!r} needs an absolute path: file:///folder/….")
    if scheme != "file" and not parts[0]:
        raise InvalidOption(f"{url!r} names no bucket; write {DESCRIBED}.")
    if QUERY.search(path) or (scheme != "file" and "@" in parts[0]):
        raise InvalidOption(
            f"{url!r} has credentials or a query, which would be stored and shown; processes that read objects take "
            "credentials from their environment."
        )
    if any(part in (".", "..") for part in parts) or "\0" in path:
        raise InvalidOption(f"{url!r} has a part '.' or '..', which names of objects must not have.")
    return f"{scheme}://{path.rstrip('/')}"


def refuse_outside(url: str, roots: Roots) -> None:
    """Raise InvalidOption if the URL is of a local file that is beneath none of the roots."""
    if url.startswith(LOCAL):
        roots.find(Path(url.removeprefix(LOCAL)))


# Options of every store besides the environment's; by default obstore repeats a failed request for three minutes.
STORE_OPTIONS: Mapping[str, Any] = {}


@lru_cache(maxsize=64)
def open_store(scheme: str, bucket: str) -> Any:
    """Return obstore's store of a bucket, kept for the life of the process with its connections."""
    from obstore.store import LocalStore, from_url  # imported here, because most jobs need no object storage

    if scheme == "file":
        return LocalStore("/")
    return from_url(f"{scheme}://{bucket}", **STORE_OPTIONS)


@contextmanager
def _located(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the store of a URL made by `normalize`, and the path in it; errors of obstore become those of here."""
    scheme, _, path = url.partition("://")
    bucket, _, name = ("", "", path.lstrip("/")) if scheme == "file" else path.partition("/")
    try:
        yield open_store(scheme, bucket), name
    except Exception as error:
        raise _translate(url, error) from error


@contextmanager
def _local(url: str) -> Iterator[Path]:
    """Yield the path of a local file; errors of the system become those of here."""
    try:
        yield Path(url.removeprefix(LOCAL))
    except OSError as error:
        raise _translate(url, error) from error


def _translate(url: str, error: Exception) -> Exception:
    """Return our error for one of obstore's."""
    from obstore.exceptions import PreconditionError

    if isinstance(error, FileNotFoundError):
        return ObjectChanged(f"{url} does not exist (any more).")
    if isinstance(error, PreconditionError):
        return ObjectChanged(f"{url} has been changed since the job was submitted.")
    reason = str(error).partition("\n\nDebug source")[0].strip()
    return StorageUnavailable(f"{url}: {reason}")


@lru_cache(maxsize=64)
def _compile(pattern: str) -> re.Pattern[str]:
    """Return the expression of a URL with wildcards. Raise InvalidOption if they are no pattern."""
    from fsspec.utils import glob_translate

    try:
        return re.compile(glob_translate(pattern))
    except (ValueError, re.error) as error:
        raise InvalidOption(f"{pattern!r} is no pattern: {error}.") from error


def matches(pattern: str, url: str) -> bool:
    """Return whether a URL, which may have wildcards, is the one of this object or matches it."""
    return pattern == url or (any(mark in pattern for mark in WILD) and bool(_compile(pattern).match(url)))


def find_objects(
    pattern: str, roots: Roots, check: Callable[[], object] = lambda: None
) -> Iterator[StoredObject]:
    """Yield the objects that a URL with wildcards matches, in order of name: `*` and `?` within a folder, `**` across.

    A URL without wildcards is that of one object. Folders that no match can lie in are passed over. `check` is called
    between two requests to the store, and may raise. Raise ObjectChanged if the one object does not exist.
    """
    first = min((pattern.find(mark) for mark in WILD if mark in pattern), default=-1)
    if first < 0:
        yield describe_object(pattern, roots)
        return
    _compile(pattern)
    segments = pattern.split("/")

    def may_lead(folder: str) -> bool:
        parts = folder.split("/")
        for part, segment in zip(parts, segments, strict=False):
            if segment == "**":
                return True
            if not matches(segment, part):
                return False
        return len(parts) < len(segments)

    folder = pattern[: pattern.rindex("/", 0, first)]
    listed = _list_in_turn if folder.startswith(("s3://", "gs://")) else _list_by_folder
    for each in listed(folder, may_lead, check):
        if matches(pattern, each.url):
            # What a link leads to is described as what is opened, beneath the roots.
            yield describe_object(each.url, roots) if each.url.startswith(LOCAL) else each


def _list_in_turn(
    folder: str, may_lead: Callable[[str], bool], check: Callable[[], object]
) -> Iterator[StoredObject]:
    """Yield the objects below a folder of a store that lists them in order of name, some in memory at a time.

    Where these end in a folder that may not lead to a match, the list begins again behind that folder; but not in a
    store that passes over where it is to begin, or has another order.
    """
    begin, has_order = "", True
    while True:
        last = begin
        for page in _list_pages(folder, begin.split("/", 3)[3] if begin else None):
            check()
            names = [last, *(each.url for each in page)]
            last, has_order = names[-1], has_order and all(map(lt, names, names[1:]))
            yield from (each for each in page if each.url > begin)
            ends = (place for place in range(len(folder) + 1, len(last)) if last[place] == "/")
            blind = next((last[:end] for end in ends if not may_lead(last[:end])), None)
            if blind is not None and has_order:
                begin = f"{blind}/\U0010ffff"  # behind whatever the folder has
                break
        else:
            return


def _list_by_folder(
    folder: str, may_lead: Callable[[str], bool], check: Callable[[], object]
) -> Iterator[StoredObject]:
    """Yield the objects below a folder in order of name, listing each folder by itself; its objects are in memory."""
    import obstore

    check()
    listed: Any = {"objects": (), "common_prefixes": ()}
    with _located(folder) as (store, path), suppress(FileNotFoundError):
        listed = obstore.list_with_delimiter(store, path or None)
    root = folder.removesuffix(path) if path else f"{folder}/"
    found = {root + each["path"]: each for each in listed["objects"]}
    for name in sorted([*found, *(f"{root}{prefix.rstrip('/')}/" for prefix in listed["common_prefixes"])]):
        if name in found:
            yield _describe(name, found[name])
        elif may_lead(name.rstrip("/")):
            yield from _list_by_folder(name.rstrip("/"), may_lead, check)


def list_folder(folder: str, roots: Roots) -> Iterator[StoredObject]:
    """Yield all objects below a folder, in any order. A folder that does not exist has none."""
    refuse_outside(folder, roots)
    for page in _list_pages(folder):
        yield from page


def _list_pages(folder: str, offset: str | None = None) -> Iterator[list[StoredObject]]:
    """Yield the objects below a folder whose paths come behind `offset`, some at a time."""
    import obstore

    with _located(folder) as (store, path), suppress(FileNotFoundError):
        root = folder.removesuffix(path) if path else f"{folder}/"
        pages: Iterable[Any] = obstore.list(store, path or None, offset=offset, chunk_size=LISTED_AT_ONCE)
        for page in pages:
            yield [_describe(root + each["path"], each) for each in page]


def describe_object(url: str, roots: Roots) -> StoredObject:
    """Return the present state of an object. Raise ObjectChanged if it does not exist."""
    if url.startswith(LOCAL):
        with _local(url) as local, roots.open_file(local) as file:
            status = os.fstat(file.fileno())
        # As obstore makes it, by which the file is read.
        tag = f'"{status.st_ino:x}-{status.st_mtime_ns // 1000:x}-{status.st_size:x}"'
        return StoredObject(url, status.st_size, tag, status.st_mtime)
    import obstore

    with _located(url) as (store, path):
        return _describe(url, obstore.head(store, path))


def _describe(url: str, meta: Any) -> StoredObject:
    modified = meta["last_modified"].timestamp()
    tag = meta["e_tag"] or f"{modified}-{meta['size']}"
    if url.startswith("az://"):
        tag = f'"{tag.strip(chr(34))}"'  # lists of Azure have no quotes around it
    return StoredObject(url, meta["size"], tag, modified)


def read_range(url: str, tag: str, start: int, end: int) -> bytes:
    """Return the bytes of an object from `start` up to `end`. Raise ObjectChanged if its tag is another one now."""
    import obstore

    if start >= end:
        return b""
    with _located(url) as (store, path):
        return bytes(obstore.get(store, path, options={"range": (start, end), "if_match": tag}).bytes())


def read_stream(url: str, tag: str, part_bytes: int) -> Iterator[bytes]:
    """Yield the content of an object in parts of about `part_bytes`. Raise ObjectChanged if its tag is another one."""
    import obstore

    with _located(url) as (store, path):
        for part in obstore.get(store, path, options={"if_match": tag}).stream(min_chunk_size=part_bytes):
            yield bytes(part)


class ObjectFile(io.RawIOBase):
    """An object as a read-only file for pyarrow; each read asks for its range under the object's tag."""

    def __init__(self, found: StoredObject) -> None:
        super().__init__()
        self._found = found
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._found.num_bytes}
        self._position = max(0, starts[whence] + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        end = self._found.num_bytes
        if size is not None and size >= 0:
            end = min(end, self._position + size)
        content = read_range(self._found.url, self._found.tag, self._position, end)
        self._position += len(content)
        return content

    def readall(self) -> bytes:
        return self.read()


def write_object(url: str, content: "Buffer", roots: Roots, *, only_new: bool = False) -> bool:
    """Write an object at once. With `only_new` return False if it exists already, and leave that as it is."""
    if url.startswith(LOCAL):
        with _local(url) as local:
            return roots.write(local, content, only_new=only_new)
    import obstore
    from obstore.exceptions import AlreadyExistsError

    with _located(url) as (store, path):
        try:
            obstore.put(store, path, content, mode="create" if only_new else "overwrite")
        except AlreadyExistsError:
            return False
    return True


def delete_object(url: str, roots: Roots) -> None:
    """Delete an object; do nothing if it does not exist."""
    if url.startswith(LOCAL):
        with _local(url) as local, suppress(FileNotFoundError):
            roots.delete(local)
        return
    import obstore

    with _located(url) as (store, path), suppress(FileNotFoundError):
        obstore.delete(store, path)
