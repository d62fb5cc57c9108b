"""Extract as the reference implementation does: one text and one prompt at a time, in fp32.

Prompts, windows and decoding are our own, which tests compare with the reference's. With the option
`encoder=transformers` the encoder is transformers', called as the reference calls its copy of it: it has its
own relative positions, a mask for each pair of tokens, and projects the positions again in every layer of
every pass. Without the option our network encodes.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.children.extraction import SCHEMAS, digest_records, split_tag
from benchmarks.children.serving import ChildOrder, Encoded, serve
from vectormill.jobs.item import ItemFailure
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.tasks.extract.extract import name_inputs
from worker.tasks.extract.extraction import Extraction
from worker.tasks.extract.model.head import find_cells, pad_inputs
from worker.tasks.extract.model.network import RexNetwork, load_network
from worker.tasks.extract.prompts import PromptTokenizer

CPU = torch.device("cpu")
ENCODER = "encoder"
TRANSFORMERS = "transformers"


class OneAtATime:
    """An extractor that gives every forward pass a single prompt. Call it with tagged texts."""

    def __init__(self, order: ChildOrder) -> None:
        directory = Path(order.model)
        self._tokenizer = PromptTokenizer(directory)
        self._network = load_network(directory, torch.float32, CPU)
        if order.options.get(ENCODER) == TRANSFORMERS:
            use_transformers(self._network, directory)
        self._num_records = 0

    def __call__(self, texts: list[str]) -> Encoded:
        num_tokens = 0
        answers: list[Any] = []
        for tagged in texts:
            number, text = split_tag(tagged)
            extraction = Extraction(self._tokenizer, SCHEMAS[number], [text])
            prompts = extraction.start()
            while prompts is not None:
                batch = Batch(name_inputs(prompts).inputs)
                num_tokens += batch.num_tokens
                rows = [self._compute_cells(batch.part(place, place + 1)) for place in range(len(batch))]
                prompts = extraction.take(Ragged.join(rows))
            (answer,) = extraction.finish()
            assert not isinstance(answer, ItemFailure), answer
            answers.append(answer)
        self._num_records = sum(map(len, answers))
        return Encoded(digest_records(answers), num_tokens, num_tokens)

    def _compute_cells(self, batch: Batch) -> Ragged:
        inputs = pad_inputs(batch, CPU)
        with torch.inference_mode():
            return find_cells(self._network(**inputs.tokens, is_token=inputs.is_token), inputs)

    def report(self) -> dict[str, Any]:
        """Return the number of records and a padding share of 0: a batch of one is never padded."""
        return {"num_records": self._num_records, "square_padding": 0.0}


def use_transformers(network: RexNetwork, directory: Path) -> None:
    """Replace our encoder with transformers' DeBERTa, with the same weights."""
    from transformers import DebertaV2Config, DebertaV2Model

    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    rows = network.plm["embeddings"].word_embeddings.num_embeddings
    with torch.device("meta"):
        model = DebertaV2Model(DebertaV2Config(**config | {"vocab_size": rows}))
    model.load_state_dict(network.plm.state_dict(), strict=True, assign=True)
    model.embeddings.position_ids = torch.arange(config["max_position_embeddings"])[None]
    model.eval()
    if model.encoder.conv is not None:
        convolve = model.encoder.conv.forward
        # The layer computes 1 - mask, which torch refuses for the boolean mask that a two-dimensional mask
        # becomes.
        model.encoder.conv.forward = lambda states, before, mask: convolve(states, before, mask.long())

    def encode(
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        prefix_blocks: Tensor,
        type_segments: Tensor,
        is_token: Tensor,
        received: Tensor | None = None,
    ) -> Tensor:
        assert received is None, "the whole network is here, on one device"
        embedded = model.embeddings(
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            mask=torch.ones_like(input_ids),
        )
        sees = (see(prefix_blocks) & see(type_segments) & is_token[:, None, :]).long()
        relative = position_ids[:, :, None] - position_ids[:, None, :]
        states: Tensor = model.encoder(
            embedded, sees, output_hidden_states=False, relative_pos=relative
        ).last_hidden_state
        return states

    network.encode = encode  # type: ignore[method-assign]


def see(groups: Tensor) -> Tensor:
    """Return which tokens attend to each other: those of one group, and those of group 0 to all.

    `groups` is [n, length]; the result is boolean [n, length, length].
    """
    rows, columns = groups[:, :, None], groups[:, None, :]
    return (rows == columns) | (rows == 0) | (columns == 0)


if __name__ == "__main__":
    serve(OneAtATime)
