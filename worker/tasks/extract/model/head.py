"""Find the cells that form spans among a batch's logits. The matrices of L² logits stay on the device.

The result is one row per sequence of `1 + CELL_WIDTH * cells` numbers of 4 bytes, as `records.read_cells`
reads them: 16 bytes per cell. Cells (head, type) and (type, tail) are returned if they are positive, cells
(head, tail) if they are positive and both ends are positive for one type: others form no span. For a sequence
with more than `max_cells` cells only their number is returned, and its text fails; a sequence with a logit
that is not finite gets a marker instead.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vectormill.ragged import Ragged
from worker.batching.batch import TOKEN_INPUTS, TYPE_SEGMENTS, Batch
from worker.encoder.padding import pad_batch
from worker.model.cuda_pass import copy_inputs
from worker.model.forms import ATTENTION_MASK
from worker.tasks.extract.prompts import IS_BLANK
from worker.tasks.extract.records import CELL_WIDTH, NON_FINITE_ROW
from worker.tokens.tokenized import TOKEN_TYPE_IDS

# A row of 1 MiB. A window of 512 tokens has fewer cells even if two of three tokens are positive for every
# type.
MAX_CELLS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """Padded inputs on the device: `tokens` by name and `is_token` are [n, length], `is_blank` is [n]."""

    tokens: Mapping[str, Tensor]
    is_token: Tensor
    is_blank: Tensor


def pad_arrays(batch: Batch, pad_token_id: int = 0) -> dict[str, NDArray[np.int64]]:
    """Return a batch as padded arrays on the host, by name, as `name_inputs` takes them."""
    padded = pad_batch(batch, pad_token_id)
    is_blank = np.zeros(len(batch), dtype=np.int64)
    if IS_BLANK in batch.inputs:
        is_blank[:] = batch.inputs[IS_BLANK].covered
    return {**padded.tokens, ATTENTION_MASK: padded.attention_mask, IS_BLANK: is_blank}


def name_inputs(tensors: Mapping[str, Tensor]) -> PaddedInputs:
    """Return the arrays of `pad_arrays`, now on the device, as inputs."""
    tokens = {name: tensor for name, tensor in tensors.items() if name in TOKEN_INPUTS}
    return PaddedInputs(tokens, tensors[ATTENTION_MASK].bool(), tensors[IS_BLANK].bool())


def pad_inputs(batch: Batch, device: torch.device, pad_token_id: int = 0) -> PaddedInputs:
    """Copy a batch to the device without waiting for computations that are queued there."""
    arrays = pad_arrays(batch, pad_token_id)
    return name_inputs(dict(zip(arrays, copy_inputs(list(arrays.values()), device), strict=True)))


def find_cells(logits: Tensor, inputs: PaddedInputs, max_cells: int = MAX_CELLS) -> Ragged:
    """Return the rows of cells for logits [n, length, length].

    The host waits for the device twice: for the total number of cells, and for all numbers in one copy.
    """
    return read_rows(gather_cells(logits, inputs, max_cells=max_cells).cpu().numpy(), len(logits))


def find_places(token_type_ids: Tensor, type_segments: Tensor, is_token: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens belong to the text, and which are a [TYPE] of the hint: bool [n, length] each.

    The hint has as many tokens as there are type ids 0, wherever these are.
    """
    num_hint_tokens = ((token_type_ids == 0) & is_token).sum(dim=1, keepdim=True)
    is_hint = torch.arange(is_token.shape[1], device=is_token.device) < num_hint_tokens
    before = torch.nn.functional.pad(type_segments[:, :-1], (1, 0))
    is_type = (type_segments > 0) & (type_segments != before) & is_token
    return is_token & ~is_hint, is_type & is_hint


def find_wanted(logits: Tensor, is_text: Tensor, is_type: Tensor, is_blank: Tensor) -> Tensor:
    """Return which cells are returned, bool [n, length, length].

    For sequences with `is_blank` [n] these are the cells of the text's first token with itself and with each
    type, whatever their signs.
    """
    is_first = is_text & (is_text.cumsum(dim=1) == 1)
    positive = logits > 0
    blank = is_blank[:, None, None]
    # [n, length]: the tokens that may be a head or a tail.
    ends = torch.where(is_blank[:, None], is_first, is_text)
    positive |= blank
    heads = positive & ends[:, :, None] & is_type[:, None, :]
    tails = positive & is_type[:, :, None] & ends[:, None, :]
    spans = (positive & ends[:, :, None] & ends[:, None, :]).triu()
    # The number of types for which both ends are positive: at most the 256 tokens of a hint, which any float
    # type counts exactly.
    spans &= (heads.to(logits.dtype) @ tails.to(logits.dtype)) > 0
    return spans | heads | tails


def gather_cells(
    logits: Tensor, inputs: PaddedInputs, room: int | None = None, *, max_cells: int = MAX_CELLS
) -> Tensor:
    """Return the numbers of the wanted cells of logits [n, length, length], as `join_cells` does."""
    tokens, is_token = inputs.tokens, inputs.is_token
    is_text, is_type = find_places(tokens[TOKEN_TYPE_IDS], tokens[TYPE_SEGMENTS], is_token)
    wanted = find_wanted(logits, is_text, is_type, inputs.is_blank)
    is_inside = is_token[:, :, None] & is_token[:, None, :]
    is_finite = (torch.isfinite(logits) | ~is_inside).flatten(1).all(dim=1)

    def read(sequences: Tensor, rows: Tensor, columns: Tensor) -> list[Tensor]:
        return [rows, columns, logits[sequences, rows, columns], logits[sequences, columns, rows]]

    return join_cells(wanted, is_finite, read, room, max_cells)


def join_cells(
    wanted: Tensor,
    is_finite: Tensor,
    read: Callable[..., list[Tensor]],
    room: int | None,
    max_cells: int = MAX_CELLS,
) -> Tensor:
    """Return all numbers of a batch's cells in one float32 tensor, in the order of `wanted` [n, ...].

    These are the number of cells of each sequence, or the marker of one that is not finite [n]; the number of those
    that follow [n]; and the cells, of which `read` gives the CELL_WIDTH columns for their indices in `wanted`.
    Without `room` the host waits for the number of all cells. With it there is room for so many cells, more are
    left out, and nothing waits.
    """
    counts = wanted.flatten(1).sum(dim=1)
    is_sent = (counts <= max_cells) & is_finite
    sent = wanted & is_sent.view(-1, *[1] * (wanted.dim() - 1))
    indices = sent.nonzero() if room is None else torch.nonzero_static(sent, size=room, fill_value=0)
    cells = torch.stack([column.float() for column in read(*indices.unbind(1))], dim=1)
    signs = torch.where(is_finite, counts.float(), NON_FINITE_ROW)
    # At most `max_cells` cells are sent of a sequence, a number that float32 holds exactly.
    return torch.cat((signs, torch.where(is_sent, counts, 0).float(), cells.flatten()))


def count_cells(numbers: NDArray[np.float32], num_sequences: int) -> NDArray[np.int64]:
    """Return how many cells follow of each sequence in the numbers of `join_cells`, if there was room."""
    return numbers[num_sequences : 2 * num_sequences].astype(np.int64)


def read_rows(numbers: NDArray[np.float32], num_sequences: int) -> Ragged:
    """Return a row for each sequence from the numbers of `join_cells`, which had room for all cells."""
    counts = count_cells(numbers, num_sequences)
    cells = numbers[2 * num_sequences :][: CELL_WIDTH * int(counts.sum())]
    lengths = 1 + CELL_WIDTH * counts
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    values = np.empty(offsets[-1], dtype=np.float32)
    is_sign = np.zeros(len(values), dtype=np.bool_)
    is_sign[offsets[:-1]] = True
    values[is_sign] = numbers[:num_sequences]
    values[~is_sign] = cells
    return Ragged(values, offsets)
