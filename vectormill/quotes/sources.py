"""Samples of sources: random rows of a query on Postgres, and of others what can be read while a client waits."""

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Final, cast

from vectormill.domain.errors import InvalidOption, SourceFailed
from vectormill.jobs.item import Item, Items
from vectormill.quotes.figure import Figure
from vectormill.quotes.sample import MOST_ROWS, TextSample
from vectormill.sources.opening import PATIENCE_SECONDS, open_source
from vectormill.sources.options import PUSH
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import Source
from vectormill.sources.sql import SqlReader

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
            sample.rows = Figure.exact(num_all)
            sample.notes.append(f"{sample.num_rows:,} random rows were read.")
        sample.distinct = Figure.exact(num_distinct)
    elif not is_over:
        planned = reader.count_rows()
        if planned is None or planned < sample.num_rows:
            sample.notes.append(
                f"Only the first {sample.num_rows:,} rows were read, and how many follow is not known."
            )
            sample.rows = Figure.exact(sample.num_rows)
        else:
            sample.notes.append(
                f"Only the first {sample.num_rows:,} rows were read; the planner counted the others."
            )
            sample.rows = Figure(planned, planned / PLANNED_FACTOR, planned * PLANNED_FACTOR)
    return sample
