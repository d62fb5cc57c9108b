"""Each pooling on three tokens and one of padding, worked out by hand."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vectormill.models.poolings import POOLING_NAMES

STATES = [[1.0, -1.0], [2.0, 0.0], [6.0, 4.0], [99.0, 99.0]]  # the last is padding
ALL, WITHOUT_PROMPT = [1, 1, 1, 0], [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("mode", "mask", "expected"),
    [
        ("cls", ALL, [1.0, -1.0]),
        ("cls", WITHOUT_PROMPT, [2.0, 0.0]),
        ("max", ALL, [6.0, 4.0]),
        ("mean", ALL, [3.0, 1.0]),
        ("mean", WITHOUT_PROMPT, [4.0, 2.0]),
        ("mean_sqrt_len", ALL, [9.0 / 3**0.5, 3.0 / 3**0.5]),
        ("weighted_mean", ALL, [(1 + 4 + 18) / 6, (-1 + 0 + 12) / 6]),
        ("weighted_mean", WITHOUT_PROMPT, [(4 + 18) / 5, 12 / 5]),  # tokens keep the weights they had
        ("last_token", ALL, [6.0, 4.0]),
        ("last_token", WITHOUT_PROMPT, [6.0, 4.0]),
    ],
)
def test_a_pooling_takes_the_tokens_that_count_and_no_padding(
    mode: str, mask: list[int], expected: list[float]
) -> None:
    import torch

    from worker.model.pooling import pool_hidden_states

    pooled = pool_hidden_states(torch.tensor([STATES]), torch.tensor([mask]), (mode,))
    np.testing.assert_allclose(pooled.numpy(), [expected], rtol=1e-6)


def test_poolings_are_concatenated_in_the_given_order_and_computed_in_fp32() -> None:
    import torch

    from worker.model.pooling import pool_hidden_states

    pooled = pool_hidden_states(
        torch.tensor([STATES], dtype=torch.float16), torch.tensor([ALL]), ("mean", "cls")
    )
    assert pooled.dtype == torch.float32
    assert pooled.tolist() == [[3.0, 1.0, 1.0, -1.0]]


@pytest.mark.parametrize("modes", [("cls",), ("last_token",), ("last_token", "cls")])
def test_of_packed_states_single_tokens_alone_are_widened(
    modes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from worker.model.pooling import pool_packed_states

    states = torch.tensor(STATES, dtype=torch.bfloat16)
    bounds, prompts = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([1, 0])
    expected = pool_packed_states(states.float(), bounds, prompts, modes)
    widened: list[int] = []
    widen = torch.Tensor.float

    def note(tensor: torch.Tensor) -> torch.Tensor:
        widened.append(len(tensor) if tensor.dtype == torch.bfloat16 else 0)
        return widen(tensor)

    monkeypatch.setattr(torch.Tensor, "float", note)
    pooled = pool_packed_states(states, bounds, prompts, modes)
    assert pooled.dtype == torch.float32
    assert torch.equal(pooled, expected)
    assert max(widened) == 2, "as many states as there are sequences, and not every token's"


SETTINGS = st.tuples(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 99)
)


@given(SETTINGS, st.lists(st.sampled_from(sorted(POOLING_NAMES)), min_size=1, max_size=3, unique=True))
@example(([1], 0, 0), ["mean"])  # one token alone
@example(([2, 1, 9], 1, 0), ["weighted_mean", "last_token"])  # a sequence that is all prompt
@example(([2, 1, 9], 3, 0), ["cls", "max", "mean_sqrt_len"])
def test_pooling_packed_sequences_is_pooling_padded_ones(
    case: tuple[list[int], int, int], modes: list[str]
) -> None:
    import torch

    from worker.model.pooling import pool_hidden_states, pool_packed_states

    lengths, longest_prompt, seed = case
    prompts = [min(row % (longest_prompt + 1), length) for row, length in enumerate(lengths, start=1)]
    states = torch.randn(sum(lengths), 3, generator=torch.Generator().manual_seed(seed))
    padded = torch.full((len(lengths), max(lengths), 3), 99.0)
    mask = torch.zeros(len(lengths), max(lengths))
    for row, (part, prompt) in enumerate(zip(states.split(lengths), prompts, strict=True)):
        padded[row, : len(part)] = part
        mask[row, prompt : len(part)] = 1
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    found = pool_packed_states(
        states, cu_seqlens, torch.tensor(prompts) if longest_prompt else None, tuple(modes)
    )
    expected = pool_hidden_states(padded, mask, tuple(modes))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # Not close to: the same, whatever stands before and behind it.
    alone = pool_packed_states(
        states[: lengths[0]],
        torch.tensor([0, lengths[0]], dtype=torch.int32),
        torch.tensor(prompts[:1]) if longest_prompt else None,
        tuple(modes),
    )
    assert torch.equal(alone[0], found[0])
