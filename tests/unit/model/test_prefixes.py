"""Prefixes that sequences share: one row for each distinct prefix, as a set of prefixes counts them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.model.prefixes import LEAST_SHARE, ROWS_OF_TOKENS, TOKENS_OF_ROWS, find_shared_prefixes

# Few different tokens, so that prefixes are shared; 256 has the first byte of 0.
TOKENS = st.sampled_from([0, 1, 256])
INPUTS = st.lists(st.tuples(TOKENS, st.sampled_from([0, 1])), min_size=1, max_size=6)


@given(st.lists(INPUTS, min_size=1, max_size=8))
def test_each_distinct_prefix_has_one_row(sequences: list[list[tuple[int, int]]]) -> None:
    values = np.array([token for sequence in sequences for token in sequence], np.int64)
    cu_seqlens = np.cumsum([0, *map(len, sequences)])
    prefixes = [tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))]
    found = find_shared_prefixes(values, cu_seqlens)
    num_saved = len(prefixes) - len(set(prefixes))
    assert bool(found) == (len(sequences) > 1 and num_saved >= LEAST_SHARE * len(prefixes))
    if found:
        rows, tokens = found[ROWS_OF_TOKENS], found[TOKENS_OF_ROWS]
        assert len(tokens) == len(set(prefixes))
        assert [prefixes[token] for token in tokens[rows]] == prefixes
        assert (np.diff(tokens) > 0).all()


def test_sequences_without_tokens_share_nothing() -> None:
    assert not find_shared_prefixes(np.zeros((4, 1), np.int64), np.array([0, 2, 2, 4]))
