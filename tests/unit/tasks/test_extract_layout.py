"""Positions and masks beside the reference's rule written token by token, typed special tokens and all."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.rexuninlu import extract_of, list_cases, load_tokenizer
from vectormill.ragged import Ragged
from worker.tasks.extract.prompts import join_ids, lay_out

TOKENIZER = load_tokenizer("model")
CLS, SEP = TOKENIZER.cls_id, TOKENIZER.sep_id
PREFIX, TYPE = TOKENIZER.prefix_id, TOKENIZER.type_id
WORD = 5


def lay_out_token_by_token(ids: list[int]) -> tuple[list[int], NDArray[np.bool_]] | None:
    """Positions and mask of one sequence; None where a path has no type and there are others."""
    paths: list[tuple[list[int], list[list[int]]]] = []
    text: list[int] = []
    segment: list[int] = []
    for place, token in enumerate(ids[1:], start=1):
        if token == PREFIX:
            segment = [place]
            paths.append((segment, []))
        elif token == TYPE:
            segment = [place]
            paths[-1][1].append(segment)
        elif token == SEP:
            segment = text
            text.append(place)
        else:
            segment.append(place)
    if len(paths) > 1 and any(not types for _, types in paths):
        return None
    positions = [0]
    for path, types in paths:
        positions += range(1, 1 + len(path))
        for kind in types:
            positions += range(1 + len(path), 1 + len(path) + len(kind))
    positions += range(max(positions) + 1, max(positions) + 1 + len(text))
    mask = np.ones((len(ids), len(ids)), np.bool_)
    blocks = [(path[0], types[-1][-1]) for path, types in paths if types]
    segments = [[(kind[0], kind[-1]) for kind in types] for _, types in paths]
    for group in [blocks, *segments]:
        for one, (first, last) in enumerate(group):
            for other, (start, end) in enumerate(group):
                if one != other:
                    mask[first : last + 1, start : end + 1] = False
    return positions, mask


def see(blocks: NDArray[np.int32], segments: NDArray[np.int32]) -> NDArray[np.bool_]:
    mask = np.ones((len(blocks), len(blocks)), np.bool_)
    for numbers in (blocks, segments):
        mask &= (numbers[:, None] == 0) | (numbers == 0) | (numbers[:, None] == numbers)
    return mask


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([WORD, WORD, WORD, TYPE, TYPE, SEP, PREFIX]), max_size=24),
        min_size=1,
        max_size=4,
    )
)
def test_a_layout_is_the_references_of_each_sequence(tails: list[list[int]]) -> None:
    sequences = [[CLS, PREFIX, *tail] for tail in tails]
    ids = Ragged.from_rows([np.array(sequence) for sequence in sequences], np.int32)
    layout = lay_out(ids, TOKENIZER)
    for number, sequence in enumerate(sequences):
        rows = slice(ids.offsets[number], ids.offsets[number + 1])
        wanted = lay_out_token_by_token(sequence)
        assert layout.is_whole[number] == (wanted is not None)
        if wanted is not None:
            positions, mask = wanted
            assert layout.position_ids[rows].tolist() == positions
            np.testing.assert_array_equal(see(layout.prefix_blocks[rows], layout.type_segments[rows]), mask)


def test_all_texts_are_laid_out_at_once_as_each_alone() -> None:
    """No path, type or position of one sequence reaches into the next."""
    for model in ("model", "model_b"):
        tokenizer = load_tokenizer(model)
        windows = []
        for case in list_cases(model=model):
            extraction = extract_of(case)
            if extraction.start() is not None:
                windows += [window for _, window in extraction._asked]
        together = lay_out(join_ids(windows), tokenizer)
        offsets = join_ids(windows).offsets
        for number, window in enumerate(windows):
            alone = lay_out(join_ids([window]), tokenizer)
            rows = slice(offsets[number], offsets[number + 1])
            for name in ("position_ids", "prefix_blocks", "type_segments"):
                np.testing.assert_array_equal(getattr(together, name)[rows], getattr(alone, name))
