"""Collections of late chunking: rows are passages, and what is encoded and compared of each is a pair with its text."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.api_server import encoding_meanwhile
from tests.database import ask
from tests.indexers import KeptSource, await_run, contents, count_encoded, indexing, start_run
from tests.protocol import SPEC
from vectormill.collections.collection import CollectionOptions
from vectormill.collections.collections import create_collection, find_generation
from vectormill.collections.items import find_item
from vectormill.domain.encoding import LATE, LATE_POOLING
from vectormill.domain.errors import SourceFailed
from vectormill.jobs.item import Item, join_pair
from vectormill.models.registry import Registry
from vectormill.runs.run import CHECK, RunCounts
from vectormill.settings import Settings
from vectormill.sources.own_texts import OwnTextReader
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import TREE, Source
from vectormill.sources.sources import save_source

LATE_SPEC = replace(SPEC, long_texts=LATE, passage_overlap=8, pooling=LATE_POOLING)
SPLIT = {"by": "paragraphs", "min_chars": 20, "max_chars": 100}


def paragraph(word: str) -> str:
    return f"This is the paragraph with the word {word}, and it is long enough."


def write(path: Path, words: str) -> str:
    path.write_text("\n\n".join(map(paragraph, words)))
    return path.read_text()


@pytest.fixture
def followed(engine: Engine, tmp_path: Path) -> Iterator[Engine]:
    ask(engine, create_collection, "docs", LATE_SPEC, CollectionOptions(keep_text=True), 100)
    source = KeptSource()
    with encoding_meanwhile(engine), indexing(engine, source, source.open):
        ask(engine, save_source, "docs", Source(TREE, {"folder": str(tmp_path)}, SPLIT))
        yield engine


def follow(engine: Engine) -> RunCounts:
    run = await_run(engine, start_run(engine))
    assert run.error is None
    return run.counts


def test_a_change_in_a_document_encodes_all_of_its_passages_and_no_others(
    followed: Engine, tmp_path: Path
) -> None:
    write(tmp_path / "a.txt", "abc")
    write(tmp_path / "z.txt", "klmnopqrst")
    assert follow(followed) == RunCounts(num_seen=13, num_new=13)
    assert follow(followed) == RunCounts(num_seen=13, num_unchanged=13)
    assert count_encoded(followed) == 13
    whole = write(tmp_path / "a.txt", "abx")
    assert follow(followed) == RunCounts(num_seen=13, num_unchanged=10, num_changed=3)
    assert count_encoded(followed) == 16
    for number, word in enumerate("abx"):
        item = ask(followed, find_item, "docs", f"a.txt#{number}")
        assert (item.text, item.text_pair) == (paragraph(word), whole)
        pair = join_pair(paragraph(word).encode(), whole.encode())
        assert item.content_hash == Item("", pair).content_hash()


def test_equal_passages_of_two_documents_are_encoded_apart(followed: Engine, tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "ab")
    write(tmp_path / "b.txt", "ac")
    write(tmp_path / "c.txt", "aa")
    assert follow(followed) == RunCounts(num_seen=6, num_new=6)
    first, *others = (ask(followed, find_item, "docs", f"{name}.txt#0") for name in "abc")
    assert {item.text for item in (first, *others)} == {paragraph("a")}
    assert len({item.content_hash for item in (first, *others)}) == 3
    twice = ask(followed, find_item, "docs", "c.txt#1")
    assert twice.content_hash != others[1].content_hash
    assert twice.text_pair == f"{paragraph('a')}\n\n\x1e{paragraph('a')}"


def test_a_collection_with_texts_is_checked_and_read_by_its_own_pairs(
    followed: Engine, tmp_path: Path
) -> None:
    write(tmp_path / "a.txt", "abcdef")
    follow(followed)
    checked = await_run(followed, start_run(followed, kind=CHECK))
    assert (checked.state, checked.error) == ("completed", None)
    place = SourcePlace(followed, Settings(), Registry({}), collection="docs")
    kept = {item.key: item for batch in OwnTextReader(place).read() for item in batch}
    hashes = {key: row[0] for key, row in contents(followed).items()}
    assert {key: item.content_hash() for key, item in kept.items()} == hashes
    bare = replace(place, spec=SPEC)
    texts = [item.text.decode() for batch in OwnTextReader(bare).read() for item in batch]
    assert texts == [paragraph(word) for word in "abcdef"]


def test_passages_without_their_texts_do_not_become_late(engine: Engine, tmp_path: Path) -> None:
    ask(engine, create_collection, "docs", SPEC, CollectionOptions(keep_text=True), 100)
    write(tmp_path / "a.txt", "ab")
    ask(engine, save_source, "docs", Source(TREE, {"folder": str(tmp_path)}, SPLIT))
    source = KeptSource()
    with encoding_meanwhile(engine), indexing(engine, source, source.open):
        await_run(engine, start_run(engine))
    place = SourcePlace(engine, Settings(), Registry({}), collection="docs", spec=LATE_SPEC)
    with pytest.raises(SourceFailed, match="keeps passages without their texts"):
        list(OwnTextReader(place).read())
    assert ask(engine, find_generation, "docs").spec == SPEC
