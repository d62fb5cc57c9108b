"""Find the prefixes that the sequences of a batch share, so that they are computed once. Imports no framework.

In a causal decoder the hidden states of a prefix do not depend on what follows. So norms, projections and feed-forward
blocks need each distinct prefix once, and only attention sees every sequence whole. Source: "RadixMLP", arXiv
2601.15013.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

# The smallest share of a batch's tokens that is worth sharing. For each token and layer, indices read and write again
# what attention reads and writes: in Qwen3-0.6B, which has the widest heads for its size, 24 KiB, or 6 ns on an H200.
# A token that is not computed saves 31 MFLOP, or 60 ns. So sharing pays from a tenth on, and in larger models earlier.
# These numbers are calculated, not measured.
LEAST_SHARE: Final = 1 / 8

# The names of the results.
ROWS_OF_TOKENS: Final = "token_rows"
TOKENS_OF_ROWS: Final = "row_tokens"


def find_shared_prefixes(
    values: NDArray[np.int64], cu_seqlens: NDArray[np.int64]
) -> Mapping[str, NDArray[np.int64]]:
    """Return which rows of hidden states sequences with the token inputs `values` [tokens, inputs] need.

    Tokens with the same tokens before them have one row: ROWS_OF_TOKENS [tokens] are the rows of all tokens, and
    TOKENS_OF_ROWS [rows] one token of each row, in ascending order. The result is empty if too few rows are saved.
    """
    lengths = np.diff(cu_seqlens)
    if len(lengths) < 2 or not lengths.all():
        return {}
    content, width = values.tobytes(), values.shape[1] * values.itemsize
    texts = [content[start:end] for start, end in pairwise((cu_seqlens * width).tolist())]
    # In sorted order a sequence has the longest prefix in common with the one right before it.
    order = np.array(sorted(range(len(texts)), key=texts.__getitem__))
    earlier, later = cu_seqlens[order[:-1]], cu_seqlens[order[1:]]
    # Compare each with the one before it, token by token, as far as the shorter one goes.
    sizes = np.minimum(lengths[order[:-1]], lengths[order[1:]])
    firsts = np.cumsum(sizes) - sizes
    places = np.arange(sizes.sum()) - np.repeat(firsts, sizes)
    one, other = (values[places + np.repeat(starts, sizes)] for starts in (earlier, later))
    differing = np.where((one == other).all(axis=1), len(values), places)
    shared = np.minimum(np.minimum.reduceat(differing, firsts), sizes)
    if shared.sum() < LEAST_SHARE * len(values):
        return {}
    chosen = np.arange(len(values))  # the token that each token's row is computed for
    for source, target, size in zip(earlier.tolist(), later.tolist(), shared.tolist(), strict=True):
        chosen[target : target + size] = chosen[source : source + size]
    is_computed = chosen == np.arange(len(chosen))
    return {ROWS_OF_TOKENS: (np.cumsum(is_computed) - 1)[chosen], TOKENS_OF_ROWS: np.flatnonzero(is_computed)}
