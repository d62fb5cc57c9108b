"""Submit a job by reference: find its objects and cut them into chunks, of which only references are stored."""

from collections.abc import Callable, Iterator

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption, ObjectChanged
from vectormill.domain.task import TASKS
from vectormill.jobs.chunk import TokenEstimate
from vectormill.jobs.submission import JobWriter
from vectormill.objects.bodies import InputBody
from vectormill.objects.cutting import ChunkLimits, Cut, choose_format, cut_object
from vectormill.objects.store import StoredObject, find_objects, normalize, refuse_outside
from vectormill.settings import Settings


def find_inputs(wanted: InputBody, settings: Settings) -> Iterator[StoredObject]:
    """Yield the objects of all URLs, each once, in the order of the URLs and then of names.

    Raise InvalidOption for a URL that matches nothing or lies outside of VECTORMILL_SOURCE_ROOT, and
    StorageUnavailable.
    """
    seen: set[str] = set()
    for written in wanted.urls:
        url = normalize(written)
        refuse_outside(url, settings.source_root, "VECTORMILL_SOURCE_ROOT")
        num_found = 0
        try:
            for found in find_objects(url):
                num_found += 1
                refuse_outside(found.url, settings.source_root, "VECTORMILL_SOURCE_ROOT")
                if found.url not in seen:
                    seen.add(found.url)
                    yield found
        except ObjectChanged as error:
            raise InvalidOption(f"{url} does not exist.") from error
        if not num_found:
            raise InvalidOption(f"No object matches {url}.")


def add_objects(
    writer: JobWriter,
    wanted: InputBody,
    spec: EncodingSpec,
    settings: Settings,
    take_items: Callable[[int], object] = lambda count: None,
) -> None:
    """Add the rows of all objects to a job, chunk by chunk; `take_items` is called with the items of each.

    Raise InvalidOption, InvalidItem, StorageUnavailable, ObjectChanged if an object changes meanwhile, and DiskFull
    if there is no room to compare keys.
    """
    columns = wanted.columns
    if wanted.unique and columns.key is None:
        raise InvalidOption(
            "`unique` needs the column of keys; rows without one have names that never repeat."
        )
    if TASKS[spec.task].reads_pairs != (columns.text_pair is not None):
        needs = "needs" if columns.text_pair is None else "takes no"
        raise InvalidOption(f"The task {spec.task!r} {needs} text_pair: the column with the second text.")
    estimate = TokenEstimate(spec)
    limits = ChunkLimits(settings.chunk_max_items, settings.chunk_max_bytes, settings.max_line_bytes)
    for found in find_inputs(wanted, settings):
        format = choose_format(found, wanted.format)
        for cut in cut_object(found, format, columns, estimate, limits):
            for start, stop in _divide(cut, writer, limits):
                take_items(stop - start)
                writer.add_reference(
                    cut.reference.take(start, stop), round((stop - start) * cut.tokens_per_row)
                )
    if wanted.unique:
        writer.compare_keys()


def _divide(cut: Cut, writer: JobWriter, limits: ChunkLimits) -> Iterator[tuple[int, int]]:
    """Yield the rows of each chunk as (start, stop); the chunks of a job grow while it is written."""
    start, num_rows = 0, cut.reference.num_rows
    while start < num_rows:
        most = min(
            writer.next_chunk_tokens / max(cut.tokens_per_row, 1),
            limits.max_bytes / max(cut.bytes_per_row, 1),
            limits.max_items,
        )
        stop = min(num_rows, start + max(1, int(most)))
        yield start, stop
        start = stop
