"""Token ids: a text that a client sends as the ids of its tokens. On its way it is one text, so that nothing that
carries texts knows of it.

It begins with a byte that no UTF-8 has, nor a pair: what cannot read it finds a text that is no Unicode, and says so.
"""

from collections.abc import Sequence
from typing import Final

IDS_MARK: Final = b"\xfe"
# The largest value in arrays of ids.
LARGEST_ID: Final = (1 << 31) - 1


def write_token_ids(ids: Sequence[int]) -> bytes:
    """The ids, each from 0 to LARGEST_ID, as what is hashed, told apart and stored like any text."""
    return IDS_MARK + ",".join(map(str, ids)).encode()


def has_token_ids(text: bytes) -> bool:
    return text.startswith(IDS_MARK)


def read_token_ids(text: bytes) -> list[int]:
    """Read the ids of a text for which `has_token_ids` is true. Raise ValueError where there are none."""
    return [int(number) for number in text.removeprefix(IDS_MARK).split(b",")]
