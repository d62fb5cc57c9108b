"""The disk that rows take in Postgres, computed from how its pages are filled, and sizes in words. Uses no SQL."""

from typing import Final

# A page of Postgres has 8,192 bytes, of which the header takes 24; each row in it has a pointer of 4 bytes and a
# header of 24. A row of more than about 2,000 bytes keeps its vector in chunks of at most 1,996 bytes in another
# table, each with an id and a number (12 bytes with the length).
PAGE_BYTES: Final = 8192
PAGE_HEADER: Final = 24
POINTER: Final = 4
ROW_HEADER: Final = 24
MOST_INLINE: Final = 2000
CHUNK: Final = 1996
CHUNK_FIELDS: Final = 12
# The hash of the content with its length, the number of the job, and the header of the vector.
HASH: Final = 33
NUMBER: Final = 8
VECTOR_HEADER: Final = 8
# An entry of a B-tree beside its key, whose pages are nine tenths full: pointer, header and alignment.
ENTRY: Final = 20
FULL_SHARE: Final = 0.9
# Enough rows to fill a page in every phase that its contents can have.
NUM_ROWS: Final = 1000


def estimate_row_bytes(vector_bytes: int, key_bytes: int = 16) -> int:
    """Return the bytes on disk of a row with this vector, with its entry in the index of keys.

    The vector is without its header of 8 bytes; metadata and texts, which lie in another table, are not included.
    """
    vector = vector_bytes + VECTOR_HEADER
    others = ROW_HEADER + key_bytes + 1 + HASH + NUMBER
    entry = (key_bytes + ENTRY) / FULL_SHARE
    if others + vector <= MOST_INLINE:
        return round(_fill_pages([others + vector]) + entry)
    chunks = [CHUNK] * (vector // CHUNK) + [vector % CHUNK]
    aside = _fill_pages([ROW_HEADER + CHUNK_FIELDS + chunk for chunk in chunks if chunk])
    return round(_fill_pages([others + 18]) + aside + len(chunks) * ENTRY / FULL_SHARE + entry)


def _fill_pages(sizes: list[int]) -> float:
    """Return the bytes of pages for each repetition of rows of these sizes, which are written in this order."""
    num_pages, left = 0, 0
    for size in sizes * NUM_ROWS:
        taken = -(-size // 8) * 8 + POINTER
        if taken > left:
            num_pages, left = num_pages + 1, PAGE_BYTES - PAGE_HEADER
        left -= taken
    return num_pages * PAGE_BYTES / NUM_ROWS


def describe_bytes(num_bytes: float) -> str:
    """Format a number of bytes: 512 B, 1.5 KiB, 230 MiB, 4.2 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024:
            break
        num_bytes, unit = num_bytes / 1024, larger
    return f"{num_bytes:,.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:,.1f} {unit}"
