"""Documents of a source as rows of passages."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine

from tests.protocol import SPEC
from vectormill.domain.errors import InvalidOption
from vectormill.jobs.item import PLACE_MARK, Item, split_pair
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.settings import Settings
from vectormill.sources.opening import open_source
from vectormill.sources.parsing import Split
from vectormill.sources.passages import load_tokenizer, make_cuts, name_passages, pair_with_text
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import FILES, TREE, Source

ENGINE = create_engine("sqlite://")
PLACE = SourcePlace(
    ENGINE,
    Settings(source_root=(Path("/"),)),
    Registry({}),
    collection="docs",
    spec=replace(SPEC, model=DEFAULT_MODEL, max_tokens=256),
)
WORDS = ("vector", "index", "Schlüssel", "日本語", "😀", "a", "nightly", "the", "document", "passage.")


def write(number: int, seed: int = 1) -> str:
    """A document of paragraphs, each with its own words."""
    chance = random.Random(seed)
    return "\n\n".join(
        f"Paragraph {paragraph}. " + " ".join(chance.choices(WORDS, k=chance.randint(5, 120)))
        for paragraph in range(number)
    )


def read_tree(folder: Path, split: dict[str, Any]) -> list[Item]:
    reader = open_source(Source(TREE, {"folder": str(folder)}, split), PLACE)
    return [item for batch in reader.read() for item in batch]


@pytest.mark.parametrize(
    "split",
    [{"by": "paragraphs"}, {"by": "tokens", "tokens": 64}, {"by": "tokens", "tokens": 64, "overlap": 16}],
)
def test_a_passage_stands_in_its_document_where_it_says(tmp_path: Path, split: dict[str, Any]) -> None:
    texts = {
        "a.md": "# Title 😀\n\n" + write(9),
        "b.txt": write(7, seed=2),
        "c.txt": "short",
        "d/e.txt": "  \n",
    }
    for name, content in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    numbers: dict[str, int] = {}
    for item in read_tree(tmp_path, split):
        metadata = json.loads(item.metadata)
        passage = metadata["_passage"]
        document = passage["document"]
        assert item.key == f"{document}#{passage['index']}"
        assert passage["index"] == numbers.get(document, 0)
        assert metadata["path"] == document
        assert texts[document][passage["start"] : passage["end"]].encode() == item.text
        numbers[document] = passage["index"] + 1
    assert numbers["a.md"] > 3
    assert numbers["b.txt"] > 3
    assert (numbers["c.txt"], numbers["d/e.txt"]) == (1, 1)


def test_a_batch_of_passages_is_bounded_by_their_metadata_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vectormill.sources.passages.MOST_BYTES", 100_000)
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": "a", "body": write(60), "page": "a" * 40_000}))
    columns = {"key": "id", "text": "body", "metadata": ["page"]}
    source = Source(FILES, {"files": [str(tmp_path / "in.jsonl")], **columns}, {"by": "paragraphs"})
    batches = list(open_source(source, PLACE).read())
    assert sum(map(len, batches)) > 9
    assert max(map(len, batches)) <= 3


def test_passages_of_so_many_tokens_have_no_more_by_the_models_own_count_and_all_words() -> None:
    from tokenizers import Tokenizer

    split = Split(by="tokens", tokens=32)
    plain, _ = make_cuts(split, PLACE)
    tokenizer = Tokenizer.from_str(load_tokenizer(split, PLACE))
    content = write(20)
    (cuts,) = plain([content])
    counts = [len(tokenizer.encode(passage, add_special_tokens=False).ids) for _, passage in cuts]
    assert max(counts) <= 32
    assert sum(counts) / len(counts) > 16
    assert "".join(passage for _, passage in cuts).split() != []
    assert "".join("".join(passage for _, passage in cuts).split()) == "".join(content.split())


@given(st.text("ab \n日", min_size=1, max_size=300), st.integers(1, 40), st.data())
def test_a_passage_for_late_chunking_has_its_place_in_a_part_of_its_document(
    whole: str, window: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(whole) - 1))
    end = data.draw(st.integers(start + 1, len(whole)))
    text, pair = split_pair(pair_with_text(whole, start, whole[start:end], window))
    assert text.decode() == whole[start:end]
    assert pair is not None
    around = pair.decode()
    place = around.find(f"{PLACE_MARK}{whole[start:end]}")
    bare = around.replace(PLACE_MARK, "")
    at = place if place >= 0 else bare.find(whole[start:end])
    begin = start - at
    assert whole[begin : begin + len(bare)] == bare  # so that the place is the passage's own
    assert begin == 0 or at >= window // 2
    assert begin + len(bare) == len(whole) or len(bare) - at >= window // 2
    assert len(bare) <= max(3 * window, 5 * window // 2 + end - start)


def test_a_change_in_one_paragraph_changes_the_passages_around_it_alone() -> None:
    plain, _ = make_cuts(Split(by="paragraphs"), PLACE)
    before = write(60)
    at = before.index("Paragraph 30.")
    after = before[:at] + "Paragraph thirty, which is now a longer one than it was. " + before[at + 13 :]
    (old,), (new,) = plain([before]), plain([after])
    old_texts, new_texts = {passage for _, passage in old}, {passage for _, passage in new}
    assert len(old) > 30
    assert len(new_texts - old_texts) <= 2


def test_markdown_is_cut_at_its_headings_and_code_is_not() -> None:
    _, markdown = make_cuts(Split(by="paragraphs", min_chars=40, max_chars=300), PLACE)
    code = "```python\nx = 1\n\n# no heading\n\ny = 2\n```"
    document = f"# One\n\n{'Words of one. ' * 6}\n\n## Two\n\n{code}\n\n# Three\n\nThe end of it."
    (cuts,) = markdown([document])
    passages = [passage for _, passage in cuts]
    assert any(code in passage for passage in passages)
    assert all("Three" not in passage for passage in passages if "One" in passage)


def test_what_is_no_text_stays_whole_and_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"good \xff bad")
    (item,) = read_tree(tmp_path, {"by": "paragraphs"})
    assert item.key == "bad.txt#0"
    with pytest.raises(UnicodeDecodeError):
        item.text.decode()


@given(st.dictionaries(st.text("abc#0", min_size=1, max_size=6), st.integers(1, 4), max_size=6))
@settings(max_examples=60, deadline=None)
def test_two_documents_never_share_the_name_of_a_passage(documents: dict[str, int]) -> None:
    names = [
        passage.key
        for key, count in documents.items()
        for passage in name_passages(Item(key, b"x"), [(0, "x")] * count)
    ]
    assert len(set(names)) == len(names)


def test_a_split_that_cannot_be_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"by": "tokens", "tokens": 255}, "would be truncated: 'all-MiniLM-L6-v2' reads at most 256"),
        ({"by": "tokens", "tokens": 64, "overlap": 32}, "from 0 to 31; got 32"),
        ({"by": "paragraphs", "min_chars": 300, "max_chars": 200}, "min_chars"),
        ({"by": "sentences"}, "by: Invalid enum value"),
        ({"by": "tokens", "token": 3}, "unknown field `token`"),
    ]
    for split, said in cases:
        (tmp_path / "a.txt").write_text("text")
        with pytest.raises(InvalidOption, match=said):
            read_tree(tmp_path, split)
