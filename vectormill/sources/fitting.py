"""Fitting: whether a source's rows are what its collection's task reads: texts, or pairs of them."""

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.tasks.task import JUDGE, TASKS
from vectormill.sources.options import NONE, parse_split
from vectormill.sources.source import FILES, SQL, TREE, Source

WITH_COLUMNS = (SQL, FILES)


def refuse_unfit(source: Source, spec: EncodingSpec | None) -> None:
    """Raises InvalidOption, naming `text_pair`. Of a collection that is not there yet nothing is known."""
    if spec is None:
        return
    pair = source.options.get("text_pair")
    if pair is not None and not TASKS[spec.task].reads_pairs:
        raise InvalidOption(
            f"The source names {pair!r} for second texts (text_pair), and the collection's task, {spec.task}, reads "
            "one text a row: leave out text_pair."
        )
    if not needs_pairs(spec):
        return
    if source.kind == TREE:
        raise InvalidOption(
            f"{spec.model!r} compares two texts, and a tree has one a file: name a source with text_pair."
        )
    if source.kind in WITH_COLUMNS and pair is None:
        raise InvalidOption(
            f"{spec.model!r} compares two texts: name the column of the second ones (text_pair)."
        )
    if parse_split(source).by != NONE:
        raise InvalidOption("A pair is judged whole: leave out the split.")


def needs_pairs(spec: EncodingSpec) -> bool:
    """Return whether a text without a pair fails: with a model that embeds. A classifier reads single texts too."""
    return spec.task == JUDGE and not spec.labels


def takes_pairs(source: Source, spec: EncodingSpec) -> bool:
    """Return whether rows that are pushed may have a second text."""
    return TASKS[spec.task].reads_pairs and parse_split(source).by == NONE
