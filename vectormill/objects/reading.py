"""Read a job's objects: find them and cut them into chunks, of which only references are stored.

A request does so itself if it takes only a moment; otherwise an indexer does, under a lease.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

import msgspec
from sqlalchemy import Connection, text

from vectormill.domain.encoding import LATE, EncodingSpec
from vectormill.domain.errors import (
    Conflict,
    InvalidItem,
    InvalidOption,
    InvalidSubmission,
    LimitReached,
    NotFound,
    ObjectChanged,
    StorageUnavailable,
    SubmissionTooLarge,
)
from vectormill.files.formats import PACKED
from vectormill.files.roots import Roots
from vectormill.jobs.backlog import count_pending_items
from vectormill.jobs.chunk import TokenEstimate
from vectormill.jobs.deletion import delete_chunks
from vectormill.jobs.job import NewJob
from vectormill.jobs.jobs import find_job
from vectormill.jobs.operations import InputBody
from vectormill.jobs.submission import JobWriter
from vectormill.jobs.upload import find_written
from vectormill.objects.input import FAIL_INPUT, FINISH_INPUT, KEEP_INPUT, HeldInput
from vectormill.objects.output import leave_folder
from vectormill.objects.reference import ItemReference, open_parquet
from vectormill.objects.store import (
    StoredObject,
    describe_object,
    find_objects,
    matches,
    normalize,
    read_stream,
    refuse_outside,
)
from vectormill.rows.columns import Columns
from vectormill.rows.decoding import PARQUET, read_lines_of
from vectormill.rows.inputs import find_format
from vectormill.rows.values import encode_texts, join_pairs
from vectormill.settings import Settings

if TYPE_CHECKING:
    from vectormill.quotes.dry_run import DryRunWriter

PART_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """The most items and bytes of a chunk, and the most bytes of a row."""

    max_items: int
    max_bytes: int
    max_row_bytes: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows for one chunk or more, about as long as one another."""

    reference: ItemReference
    tokens_per_row: float
    bytes_per_row: float


def choose_format(found: StoredObject, format: str | None) -> str:
    """Return the format of an object, by its name unless it is given. Raise InvalidOption if it has none."""
    name = PurePosixPath(found.url)
    suffix = name.suffix.lower()
    chosen = format or find_format(found.url)
    if suffix in PACKED:
        raise InvalidOption(
            f"{found.url} is compressed as a whole, so that no part of it can be read alone. Use Parquet, which "
            "compresses inside, or submit the file itself."
        )
    if chosen is None:
        raise InvalidOption(
            f"{found.url} has no known format: give the format, or a name that ends in .parquet, .jsonl, .csv or .tsv."
        )
    return chosen


def cut_object(
    found: StoredObject, format: str, columns: Columns, estimate: TokenEstimate, limits: ChunkLimits
) -> Iterator[Cut]:
    """Yield the rows of an object in order.

    Raise InvalidOption if a column is missing, InvalidItem if a row is too long, and the errors of store.py.
    """
    if format == PARQUET:
        return _cut_parquet(found, columns, estimate)
    return _cut_lines(found, format, columns, estimate, limits)


def _cut_parquet(found: StoredObject, columns: Columns, estimate: TokenEstimate) -> Iterator[Cut]:
    texts = {columns.text, columns.text_pair}
    with open_parquet(found) as file:
        _find_columns(columns, file.schema_arrow.names, found.url)
        for number, num_rows in enumerate(file.group_rows):
            if not num_rows:
                continue
            sizes = dict.fromkeys(columns.names, 0.0)
            for path, num_bytes in file.measure_columns(number):
                for name in sizes:
                    if f"{path}.".startswith(f"{name}."):
                        sizes[name] += num_bytes / num_rows
            reference = ItemReference(
                found.url, found.tag, found.num_bytes, PARQUET, columns, num_rows, row_group=number
            )
            text_bytes = sum(size for name, size in sizes.items() if name in texts)
            yield Cut(reference, estimate.of(b"a" * min(round(text_bytes), PART_BYTES)), sum(sizes.values()))


def _find_columns(columns: Columns, present: Sequence[str], place: str) -> Columns:
    try:
        return columns.find(present, place)
    except InvalidItem as error:
        raise InvalidOption(str(error)) from error


def _cut_lines(
    found: StoredObject, format: str, columns: Columns, estimate: TokenEstimate, limits: ChunkLimits
) -> Iterator[Cut]:
    """Yield runs of whole rows of about one chunk each, at the places where their decoder ends its rows."""
    start, first_row, num_rows, num_bytes, num_tokens = 0, 0, 0, 0, 0
    header: tuple[str, ...] = ()
    end = 0

    def make_cut() -> Cut:
        reference = ItemReference(
            found.url, found.tag, found.num_bytes, format, columns, num_rows,
            start=start, end=min(end, found.num_bytes), first_row=first_row, header=header,
        )  # fmt: skip
        return Cut(reference, num_tokens / num_rows, num_bytes / num_rows)

    blocks = read_stream(found.url, found.tag, PART_BYTES)
    choose = partial(_find_columns, columns)
    for batch in read_lines_of(format)(blocks, choose, found.url, limits.max_row_bytes, keeps_faults=True):
        _, texts, _, pairs = columns.pick(batch.columns)
        header, begin = batch.header, batch.start
        encoded = encode_texts(texts) if pairs is None else join_pairs(encode_texts(texts), pairs)
        for place, end in enumerate(batch.ends):
            start = start if num_rows else begin
            num_rows += 1
            num_bytes += end - begin
            num_tokens += estimate.of(encoded[place])
            begin = end
            if num_rows >= limits.max_items or num_bytes >= limits.max_bytes:
                yield make_cut()
                first_row += num_rows
                num_rows = num_bytes = num_tokens = 0
    if num_rows:
        yield make_cut()


# With these errors the objects cannot become a job; after any other error they are read again.
REFUSALS: Final = (InvalidSubmission, Conflict, NotFound, LimitReached)
CHUNKS_AT_ONCE: Final = 1000
# The pause before objects are read on whose store did not answer.
STORAGE_SECONDS: Final = 15.0

logger = logging.getLogger(__name__)


def find_inputs(
    wanted: InputBody, settings: Settings, check: Callable[[], object] = lambda: None
) -> Iterator[StoredObject]:
    """Yield the objects of all URLs, each once, in the order of the URLs and then of names.

    `check` is called between two requests to the store, and may raise. Raise InvalidOption for a URL that matches
    nothing or lies outside of VECTORMILL_SOURCE_ROOT, and StorageUnavailable.
    """
    urls, roots = [normalize(written) for written in wanted.urls], Roots.of(settings, "source_root")
    for url in urls:  # all of them before the first object, after which an indexer may go on
        refuse_outside(url, roots)
    for place, url in enumerate(urls):
        num_found = 0
        try:
            for found in find_objects(url, roots, check):
                num_found += 1
                if not any(matches(earlier, found.url) for earlier in urls[:place]):
                    yield found
        except ObjectChanged as error:
            raise InvalidOption(f"{url} does not exist.") from error
        if not num_found:
            raise InvalidOption(f"No object matches {url}.")


def add_objects(
    writer: "JobWriter | DryRunWriter",
    wanted: InputBody,
    spec: EncodingSpec,
    settings: Settings,
    take_items: Callable[[int], object] = lambda count: None,
    found: Iterable[StoredObject] | None = None,
    last: ItemReference | None = None,
) -> None:
    """Add the rows of all objects, or of those `found`, to a job; `take_items` is called with the items of each chunk.

    Nothing is read if an earlier request has made the job. With `last` the rows up to that chunk are passed over.

    Raise InvalidOption, InvalidItem, StorageUnavailable, ObjectChanged if an object changes meanwhile, and DiskFull
    if there is no room to compare keys.
    """
    columns = wanted.columns
    refuse_unfit_columns(wanted, spec)
    writer.add_content(msgspec.json.encode(wanted))
    if writer.existing is not None:
        return
    estimate = TokenEstimate(spec)
    limits = ChunkLimits(settings.chunk_max_items, settings.chunk_max_bytes, settings.max_line_bytes)
    for each in find_inputs(wanted, settings, writer.check) if found is None else found:
        writer.check()
        if last is not None and each.url != last.url:
            continue
        format = choose_format(each, wanted.format)
        for cut in cut_object(each, format, columns, estimate, limits):
            writer.check()
            begin = 0 if last is None else _count_passed(cut.reference, last)
            for start, stop in _divide(cut, writer, limits, begin):
                take_items(stop - start)
                writer.add_reference(
                    cut.reference.take(start, stop), round((stop - start) * cut.tokens_per_row)
                )
        last = None
    if last is not None:
        raise ObjectChanged(f"{last.url}, of which the job has rows, is not found by its URLs any more.")
    if wanted.unique:
        writer.compare_keys()


def refuse_unfit_columns(wanted: InputBody, spec: EncodingSpec) -> None:
    """Raise InvalidOption if the columns do not suit the task, or keys are to be compared that are not named."""
    columns = wanted.columns
    if wanted.unique and columns.key is None:
        raise InvalidOption(
            "`unique` needs the column of keys; rows without one have names that never repeat."
        )
    if spec.long_texts != LATE and spec.reads_pairs != (columns.text_pair is not None):
        needs = "needs" if columns.text_pair is None else "takes no"
        raise InvalidOption(f"The task {spec.task!r} {needs} text_pair: the column with the second text.")


def _count_passed(reference: ItemReference, last: ItemReference) -> int:
    """Return how many rows of a reference come before the end of another one to the same object."""
    begin, end = (each.first_row + each.skip for each in (reference, last))
    if reference.row_group == last.row_group:
        return min(max(end + last.num_rows - begin, 0), reference.num_rows)
    return reference.num_rows if reference.row_group < last.row_group else 0


def _divide(
    cut: Cut, writer: "JobWriter | DryRunWriter", limits: ChunkLimits, start: int
) -> Iterator[tuple[int, int]]:
    """Yield the rows of each chunk from `start` on as (start, stop); the chunks of a job grow while it is written."""
    num_rows = cut.reference.num_rows
    while start < num_rows:
        most = min(
            writer.next_chunk_tokens / max(cut.tokens_per_row, 1),
            limits.max_bytes / max(cut.bytes_per_row, 1),
            limits.max_items,
        )
        stop = min(num_rows, start + max(1, int(most)))
        yield start, stop
        start = stop


# None of its chunks was dispatched or counted.
FAIL_JOB = text("""
    UPDATE vectormill.jobs SET state = 'failed', finished_at = now(), updated_at = now()
     WHERE id = :job_id AND state = 'uploading'
""")
GIVE_OUTPUT_BACK = text("DELETE FROM vectormill.job_outputs WHERE id = :job_id RETURNING url")


def read_input(held: HeldInput) -> None:
    """Read the objects of a claimed input on from where the last indexer stopped, and queue the job, or fail it.

    While the store does not answer, the input waits, without counting attempts. Raise LeaseLost and Stopping.
    """
    reason = f"The last error: {held.error}" if held.error else ""
    try:
        if held.lease.attempt > held.settings.max_attempts:
            raise InvalidSubmission(f"{held.lease.describe_attempts()} {reason}".strip())
        _queue_job(held)
    except StorageUnavailable as error:
        logger.warning("The input of job %s waits for object storage: %s", held.lease.key, error)
        with held.engine.begin() as connection:
            held.lease.hand_back(
                connection, pause_seconds=STORAGE_SECONDS, error=f"StorageUnavailable: {error}"
            )
    except REFUSALS as error:
        _delete_chunks(held)
        with held.engine.begin() as connection:
            held.lease.release(connection, FAIL_INPUT, error=str(error))
            folder = connection.execute(GIVE_OUTPUT_BACK, {"job_id": held.lease.key}).scalar_one_or_none()
            connection.execute(FAIL_JOB, {"job_id": held.lease.key})
        if folder is not None:
            with suppress(StorageUnavailable):
                leave_folder(folder, held.settings)


def _delete_chunks(held: HeldInput) -> None:
    """Delete what an earlier reading has written."""
    num_deleted = CHUNKS_AT_ONCE
    while num_deleted == CHUNKS_AT_ONCE:
        with held.engine.begin() as connection:
            held.lease.keep(connection)
            num_deleted = delete_chunks(connection, held.lease.key, CHUNKS_AT_ONCE)


def _is_unchanged(reference: ItemReference, settings: Settings) -> bool:
    try:
        return describe_object(reference.url, Roots.of(settings, "source_root")).tag == reference.tag
    except ObjectChanged:
        return False


def _queue_job(held: HeldInput) -> None:
    lease, settings = held.lease, held.settings
    with held.engine.connect() as connection:
        spec, written = find_job(connection, lease.key).spec, find_written(connection, lease.key)
    if written is not None and not _is_unchanged(written.last, settings):
        _delete_chunks(held)
        written = None

    def count() -> dict[str, int]:
        return {"num_items": writer.num_items, "num_compared": writer.num_compared}

    def take_items(num_items: int) -> None:
        if writer.num_items + num_items > settings.max_job_items:
            raise SubmissionTooLarge(
                f"The objects have more than {settings.max_job_items:,} rows (VECTORMILL_MAX_JOB_ITEMS); submit "
                "several jobs."
            )

    def finish(connection: Connection) -> None:
        num_pending = count_pending_items(connection)
        if num_pending > settings.max_pending_items:
            raise LimitReached(
                f"{num_pending:,} items would wait to be encoded with those of this job, and at most "
                f"{settings.max_pending_items:,} may wait in total (VECTORMILL_MAX_PENDING_ITEMS)."
            )
        lease.release(connection, FINISH_INPUT, **count())

    new_job = NewJob(spec, collection=held.collection, id=lease.key, is_accepted=True)
    writer = JobWriter(
        held.engine,
        new_job,
        settings,
        hold=lambda connection: lease.keep(connection, KEEP_INPUT, **count()),
        check=held.keep,
    )
    with writer:
        if written is not None:
            writer.go_on(written)
        add_objects(
            writer, held.wanted, spec, settings, take_items, last=None if written is None else written.last
        )
        writer.finish(lambda connection, _: finish(connection))
