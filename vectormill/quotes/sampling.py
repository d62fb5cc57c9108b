"""Samples of objects in a store and of the sources of collections, in parts that are spread evenly over all bytes."""

import re
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import accumulate, islice
from typing import Final, cast

import numpy as np

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption, SourceFailed
from vectormill.jobs.chunk import TokenEstimate
from vectormill.jobs.item import Item, Items
from vectormill.jobs.operations import InputBody
from vectormill.objects.reading import ChunkLimits, add_objects, choose_format, cut_object
from vectormill.objects.reference import ItemReference
from vectormill.objects.store import StoredObject, read_range
from vectormill.quotes.dry_run import DryRunWriter
from vectormill.quotes.estimate import DEVIATIONS, Estimate
from vectormill.quotes.sample import MOST_ROWS, TextSample
from vectormill.rows.decoding import DELIMITERS, PARQUET, scan_rows
from vectormill.settings import Settings
from vectormill.sources.opening import PATIENCE_SECONDS, open_source
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import PUSH, Source
from vectormill.sources.sql import SqlReader

# Objects of so many bytes together are read whole, in some seconds.
WHOLE_BYTES: Final = 32 << 20
NUM_PARTS: Final = 16
PART_BYTES: Final = 1 << 20
# Headers and the ends of parts are not counted exactly.
LEAST_SPREAD: Final = 0.01
ROWS_PER_PART: Final = MOST_ROWS // NUM_PARTS


def sample_whole(
    found: Sequence[StoredObject],
    wanted: InputBody,
    spec: EncodingSpec,
    settings: Settings,
    trial: DryRunWriter,
    until: float,
    take_items: Callable[[int], object],
) -> None:
    """Read objects in a random order until a time of the monotonic clock, and project the rows of those left over.

    At least NUM_PARTS objects are read. Raise the errors of add_objects.
    """
    order = [found[place] for place in np.random.default_rng(0).permutation(len(found))]
    ends = [0]  # the number of rows up to the end of each object

    def read() -> Iterator[StoredObject]:
        for each in order:
            if len(ends) > NUM_PARTS and time.monotonic() >= until:
                return
            yield each
            ends.append(trial.sample.num_rows)

    add_objects(trial, wanted, spec, settings, take_items, read())
    num_read = len(ends) - 1
    if num_read == len(order):
        return
    sizes, num_rows = np.array([each.num_bytes for each in order]), np.diff(ends)
    ratio = ends[-1] / max(1, sizes[:num_read].sum())
    deviation = float((num_rows - ratio * sizes[:num_read]).std(ddof=1))
    number = float(ratio * sizes.sum())
    spread = LEAST_SPREAD * number + DEVIATIONS * deviation / num_read**0.5 * len(order)
    trial.sample.rows = Estimate(number, max(ends[-1], number - spread), number + spread)
    trial.sample.notes.append(
        f"{num_read:,} of {len(order):,} objects were read; texts that repeat elsewhere are not known."
    )


def sample_objects(
    found: Sequence[StoredObject],
    wanted: InputBody,
    spec: EncodingSpec,
    settings: Settings,
    sample: TextSample,
    until: float,
) -> None:
    """Read NUM_PARTS parts of the objects, or fewer until a time, into the sample, and estimate the number of all rows.

    Raise InvalidOption if a column is missing in an object that is looked at, and the errors of store.py.
    """
    limits = ChunkLimits(settings.chunk_max_items, settings.chunk_max_bytes, settings.max_line_bytes)
    ends = list(accumulate(each.num_bytes for each in found))
    ratios: list[float] = []
    seen: dict[str, int] = {}
    blocks: set[tuple[str, int, int]] = set()
    for number in np.random.default_rng(0).permutation(NUM_PARTS).tolist():
        if len(ratios) > 1 and time.monotonic() >= until:
            break
        place = int((number + 0.5) / NUM_PARTS * ends[-1])
        chosen = bisect_right(ends, place)
        each, offset = found[chosen], place - (ends[chosen] - found[chosen].num_bytes)
        format = choose_format(each, wanted.format)
        cuts = cut_object(each, format, wanted.columns, TokenEstimate(spec), limits)
        if format == PARQUET:
            groups = [cut.reference for cut in cuts]
            num_rows, num_bytes = sum(group.num_rows for group in groups), each.num_bytes
            seen[each.url] = num_rows
            parts = [_find_block(groups, num_rows * offset // num_bytes)] if groups else []
            parts = [part for part in parts if (each.url, part.row_group, part.skip) not in blocks]
            blocks |= {(each.url, part.row_group, part.skip) for part in parts}
        else:
            next(cuts, None)  # refuses missing columns
            parts, num_rows, num_bytes = [], 0, 0
            for part_bytes in (PART_BYTES, 2 * settings.max_line_bytes):  # the second has a whole row
                parts = parts or list(_find_lines(each, format, wanted, offset, part_bytes))
            for part in parts:
                num_rows, num_bytes = part.num_rows, part.end - part.start
        ratios.append(num_rows / max(1, num_bytes))
        for part in parts:
            sample.add_all(part.take(0, min(ROWS_PER_PART, part.num_rows)).read())
    if len(seen) == len(found):
        sample.rows = Estimate.exact(sum(seen.values()))
    else:
        mean = statistics.mean(ratios)
        spread = max(LEAST_SPREAD * mean, DEVIATIONS * statistics.stdev(ratios) / len(ratios) ** 0.5)
        sample.rows = Estimate(mean, max(0.0, mean - spread), mean + spread) * ends[-1]
    sample.notes.append(
        f"{len(ratios)} parts of {len(found):,} objects were read; texts that repeat elsewhere are not known."
    )


def _find_block(groups: Sequence[ItemReference], row: int) -> ItemReference:
    """Return the block of ROWS_PER_PART rows in which a row of a Parquet file lies, at most to its group's end."""
    ends = list(accumulate(group.num_rows for group in groups))
    chosen = bisect_right(ends, row)
    group = groups[chosen]
    skip = (row - (ends[chosen] - group.num_rows)) // ROWS_PER_PART * ROWS_PER_PART
    return group.take(skip, min(skip + ROWS_PER_PART, group.num_rows))


def _find_lines(
    found: StoredObject, format: str, wanted: InputBody, offset: int, num_bytes: int
) -> Iterator[ItemReference]:
    """Yield a reference to the whole rows in so many bytes around an offset, if there are any."""
    start = max(0, min(offset - num_bytes // 2, found.num_bytes - num_bytes))
    stop = min(start + num_bytes, found.num_bytes)
    content = read_range(found.url, found.tag, start, stop)
    header: tuple[str, ...] = ()
    if format in DELIMITERS:
        _, first = next(scan_rows(read_range(found.url, found.tag, 0, PART_BYTES), format, is_part=False))
        header = tuple(first)
    if start or header:
        is_within = bool(start and header) and _begins_within_quotes(content, format, len(header))
        opened = b'"' if is_within else b""
        end, _ = next(scan_rows(opened + content, format), (0, []))  # of the rest of a row, or the header
        skipped = end - len(opened)
        start, content = start + skipped, content[skipped:]
    ends = [end for end, _ in scan_rows(content, format)]
    if stop < found.num_bytes:
        del ends[-1:]  # a row that may be broken off
    if ends:
        yield ItemReference(
            found.url, found.tag, found.num_bytes, format, wanted.columns, len(ends), start=start,
            end=start + ends[-1], header=header,
        )  # fmt: skip


# A quote that stands alone with a character of a cell on one side begins or ends a cell, since one within a cell is
# doubled (RFC 4180). The group is there only if it ends one. A pattern that begins with the quote is found 40 times as
# fast as one that begins with what stands before it.
EDGE_OF_CELL: Final = re.compile(rb'"(?:(?<=[,\t\n]")(?=[^",\t\r\n])|(?<=[^",\t\r\n]")()(?=[,\t\r\n]))')


def _begins_within_quotes(content: bytes, format: str, num_cells: int) -> bool:
    """Return True if a part of a CSV or TSV file begins within quotes.

    A part without an end of a quoted cell is within one if its lines do not have as many cells as the header. Of a
    single column such a part tells nothing, and is taken for whole rows.
    """
    edge = EDGE_OF_CELL.search(content)
    if edge is None:
        rows = [cells for _, cells in islice(scan_rows(content, format), 1, 1000)][:-1]
        return sum(len(cells) == num_cells for cells in rows) < 0.9 * len(rows)
    is_within_before = content.count(b'"', 0, edge.start()) % 2 == 1  # if the part began outside
    return is_within_before != (edge[1] is not None)


# A planner's number of rows of a query may be wrong by this factor.
PLANNED_FACTOR: Final = 2.0


def sample_source(source: Source, place: SourcePlace) -> TextSample:
    """Return a sample of the source's rows. Raise SourceFailed, and InvalidOption if its options do not fit."""
    if source.kind == PUSH:
        raise InvalidOption("A push has no rows before they are sent; quote the file instead.")
    reader, sample = open_source(source, place, patience_seconds=PATIENCE_SECONDS), TextSample()
    counted = reader.thin(MOST_ROWS) if isinstance(reader, SqlReader) else None
    until = time.monotonic() + PATIENCE_SECONDS
    is_over = False
    try:
        with closing(cast("Generator[Sequence[Item]]", reader.read())) as batches:
            for batch in batches:
                sample.add_all(Items.of(batch))
                if time.monotonic() >= until:
                    break
            else:
                is_over = True
    except SourceFailed:  # of a statement that took too long, what was read before is enough
        if not sample.num_rows or time.monotonic() < until:
            raise
    if counted is not None:
        num_all, num_distinct = counted
        if num_all > sample.num_rows:
            sample.rows = Estimate.exact(num_all)
            sample.notes.append(f"{sample.num_rows:,} random rows were read.")
        sample.distinct = Estimate.exact(num_distinct)
    elif not is_over:
        planned = reader.count_rows()
        if planned is None or planned < sample.num_rows:
            sample.notes.append(
                f"Only the first {sample.num_rows:,} rows were read, and how many follow is not known."
            )
            sample.rows = Estimate.exact(sample.num_rows)
        else:
            sample.notes.append(
                f"Only the first {sample.num_rows:,} rows were read; the planner counted the others."
            )
            sample.rows = Estimate(planned, planned / PLANNED_FACTOR, planned * PLANNED_FACTOR)
    return sample
