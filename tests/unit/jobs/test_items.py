"""Items as columns are the same items; a payload keeps whatever a client may send."""

from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from vectormill.jobs.chunk import decode_payload, encode_payload
from vectormill.jobs.item import Item, Items

KEYS = st.text(st.characters(exclude_categories=["Cs"]))
ITEMS = st.lists(
    st.builds(Item, KEYS, st.binary(), st.sampled_from([b"", b"{}", '{"ü":"\\ud800"}'.encode()]))
)
PLACES = st.lists(st.integers(0, 10))


@given(ITEMS, PLACES)
def test_columns_hold_the_same_items_as_a_list_of_them(items: list[Item], places: list[int]) -> None:
    columns = Items.of(items)
    inside = [place for place in places if place < len(items)]
    assert (len(columns), list(columns)) == (len(items), items)
    assert list(columns.take(inside)) == [items[place] for place in inside]
    assert [columns[place] for place in inside] == [items[place] for place in inside]
    assert list(columns[1:3]) == items[1:3]
    assert Items.of(columns) is columns


@given(ITEMS)
def test_columns_say_of_all_what_each_item_says_of_itself(items: list[Item]) -> None:
    columns = Items.of(items)
    assert columns.encode_keys() == [item.key.encode() for item in items]
    assert columns.content_hashes() == [item.content_hash() for item in items]
    assert columns.metadata_hashes() == [
        blake2b(item.metadata, digest_size=16).digest() if item.metadata else b"" for item in items
    ]


@given(ITEMS)
def test_a_payload_gives_back_the_items_it_was_made_of(items: list[Item]) -> None:
    blob = encode_payload(items)
    assert list(decode_payload(blob)) == items
    assert encode_payload(decode_payload(blob)) == blob
