"""Opening: which reader a source has. The one place that knows every kind."""

from vectormill.sources.fitting import refuse_unfit
from vectormill.sources.kinds.files import FileReader
from vectormill.sources.kinds.own_texts import OwnTextReader
from vectormill.sources.kinds.push import PushReader
from vectormill.sources.kinds.sql import SqlReader
from vectormill.sources.kinds.tree import TreeReader
from vectormill.sources.options import NONE, FileOptions, SqlOptions, TreeOptions, parse_options, parse_split
from vectormill.sources.passages import PassageReader
from vectormill.sources.reader import Reader, SourcePlace
from vectormill.sources.source import OWN_TEXTS, PUSH, Source


def open_source(source: Source, place: SourcePlace, *, patience_seconds: float = 0) -> Reader:
    """A reader of the source's rows: its documents, or their passages where it is split.

    Nothing is read yet. `patience_seconds` bounds statements of a source that is only looked at. Raises InvalidOption,
    also for rows that the collection's task cannot read.
    """
    refuse_unfit(source, place.find_spec())
    reader = _open_documents(source, place, patience_seconds)
    split = parse_split(source)
    # Texts that a collection keeps are passages already.
    if split.by == NONE or source.kind == OWN_TEXTS:
        return reader
    return PassageReader(reader, split, place)


def _open_documents(source: Source, place: SourcePlace, patience_seconds: float) -> Reader:
    options = parse_options(source)
    if isinstance(options, SqlOptions):
        return SqlReader(options, place, patience_seconds)
    if isinstance(options, FileOptions):
        return FileReader(options, place)
    if isinstance(options, TreeOptions):
        return TreeReader(options, place)
    if source.kind == PUSH:
        return PushReader(place)
    return OwnTextReader(place)
