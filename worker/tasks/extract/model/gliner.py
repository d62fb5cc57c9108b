"""Run a GLiNER with torch on one device, and return the spans whose probability exceeds a half.

The encoder is transformers' own. Behind it, in fp32: the states of each word's first token and of each label, an
LSTM over the words, and a logit for each span of words and each label. Modules are named as the weights are.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear, relu
from torch.nn.utils.rnn import PackedSequence

from vectormill.domain.errors import ModelError
from vectormill.models.families import find_family
from vectormill.models.gliner import ENCODER_PREFIX
from vectormill.models.model_card import GlinerConfig, ModelCard
from vectormill.models.weights import find_weights
from worker.batching.batch import WORD_MARKS, Batch
from worker.encoder.encoder import EncoderOrder
from worker.encoder.padding import pad_batch
from worker.model.forms import ATTENTION_MASK
from worker.model.network import UNUSED_WEIGHTS, find_pad_token_id, prepare_transformer
from worker.model.runtime import transformers
from worker.model.weights import read_tensors
from worker.tasks.extract.gliner import FIRST_OF_WORD, STANDS_FOR_LABEL
from worker.tasks.extract.model.encoder import ExtractionEncoder
from worker.tasks.extract.model.head import MAX_CELLS, join_cells, pad_arrays
from worker.tasks.extract.prompts import IS_BLANK
from worker.tokens.tokenized import INPUT_IDS

NEVER: Final = -1.0  # the logit of a span that would end behind the text
WORDS: Final = "words"
LABELS: Final = "labels"
NUM_WORDS: Final = "num_words"
NUM_LABELS: Final = "num_labels"
TURNS: Final = "turns"
TURN_OF_WORD: Final = "turn_of_word"


class GlinerHead(nn.Module):
    """What follows the encoder: hidden states of all sequences to logits of spans, for each sequence alone."""

    def __init__(self, config: GlinerConfig) -> None:
        super().__init__()
        inner, size = int(config.encoder.get("hidden_size") or config.encoder["d_model"]), config.hidden_size
        has_projection, num_layers = inner != size, config.num_rnn_layers
        self.token_rep_layer = nn.ModuleDict({"projection": nn.Linear(inner, size)} if has_projection else {})
        lstm = nn.LSTM(size, size // 2, max(1, num_layers), batch_first=True, bidirectional=True)
        self.rnn = nn.ModuleDict({"lstm": lstm} if num_layers > 0 else {})
        parts = {"project_start": size, "project_end": size, "out_project": 2 * size}
        spans = nn.ModuleDict({name: _project(width, size) for name, width in parts.items()})
        self.span_rep_layer = nn.ModuleDict({"span_rep_layer": spans})
        self.prompt_rep_layer = _project(size, size)
        self.max_width = config.max_width

    def forward(self, states: Tensor, places: Mapping[str, Tensor], num_by_turn: Tensor) -> Tensor:
        """Return the logits [n, words, widths, labels] of hidden states [n, length, hidden].

        `places` are those of `find_places` on the device, and `num_by_turn` stays on the host. Logits of padding and of
        spans that end behind their text are NEVER.
        """
        flat = states.flatten(0, 1)
        words, labels = flat[places[WORDS]], flat[places[LABELS]]  # [n, words, hidden], [n, labels, hidden]
        if self.token_rep_layer:
            words, labels = (self.token_rep_layer["projection"](each) for each in (words, labels))
        if self.rnn:
            in_turns = PackedSequence(words.flatten(0, 1)[places[TURNS]], num_by_turn)
            words = self.rnn["lstm"](in_turns)[0].data[places[TURN_OF_WORD]]
        spans = self.span_rep_layer["span_rep_layer"]
        # `out_project` of a start beside an end, whose second layer is then multiplied with each label: its first
        # layer is applied to starts and ends before they are paired, its second layer to the few labels.
        wide, _, _, narrow = spans["out_project"]
        of_start, of_end = wide.weight.chunk(2, dim=1)
        starts = linear(relu(spans["project_start"](words)), of_start)
        ends = linear(relu(spans["project_end"](words)), of_end, wide.bias)
        labels = self.prompt_rep_layer(labels)
        weights, biases = (labels @ narrow.weight).transpose(1, 2), (labels @ narrow.bias).unsqueeze(1)
        num_words, num_labels = places[WORDS].shape[1], places[LABELS].shape[1]
        logits = starts.new_empty((len(starts), num_words, self.max_width, num_labels))
        for width in range(min(self.max_width, num_words)):
            pairs = relu(starts[:, : num_words - width] + ends[:, width:])
            logits[:, : num_words - width, width] = torch.baddbmm(biases, pairs, weights)
        return torch.where(find_spans(places, self.max_width), logits, NEVER)


def find_spans(places: Mapping[str, Tensor], max_width: int) -> Tensor:
    """Return which logits are those of a span within the text and of a label: bool [n, words, widths, labels]."""
    words, labels = (
        torch.arange(places[name].shape[1], device=places[name].device) for name in (WORDS, LABELS)
    )
    ends = words[:, None] + torch.arange(max_width, device=words.device)
    is_inside = ends < places[NUM_WORDS][:, None, None]
    is_label = labels < places[NUM_LABELS][:, None]
    return is_inside[..., None] & is_label[:, None, None]


def find_places(batch: Batch) -> dict[str, NDArray[np.int64]]:
    """Return where a padded batch has its words and labels, for the head, which asks the device nothing.

    `words` [n, words] and `labels` [n, labels] are indices of hidden states in one row, followed by zeros. An LSTM
    reads the first words of all texts, then the second ones: `turns` [all words] are indices of `words` in one row in
    that order, and `turn_of_word` [n, words] is where each of them went.
    """
    marks = pad_batch(batch, 0).tokens[WORD_MARKS]
    num_words, words = _place(marks == FIRST_OF_WORD)
    num_labels, labels = _place(marks == STANDS_FOR_LABEL)
    longest_first = np.argsort(-num_words, kind="stable")
    turns = np.arange(words.size).reshape(words.shape)[longest_first].T
    turns = turns[np.arange(words.shape[1])[:, None] < num_words[longest_first]]
    turn_of_word = np.zeros(words.size, dtype=np.int64)
    turn_of_word[turns] = np.arange(len(turns))
    return {
        WORDS: words,
        LABELS: labels,
        NUM_WORDS: num_words,
        NUM_LABELS: num_labels,
        TURNS: turns,
        TURN_OF_WORD: turn_of_word.reshape(words.shape),
    }


def _place(is_one: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number [n] of each row's True values, and their indices in one row [n, largest number], then zeros."""
    counts = is_one.sum(axis=1)
    places = np.zeros((len(is_one), int(counts.max())), dtype=np.int64)
    places[np.arange(places.shape[1]) < counts[:, None]] = np.flatnonzero(is_one)
    return counts, places


def _project(width: int, size: int) -> nn.Sequential:
    """Return the package's `create_projection_layer`; the identity stands where it has a dropout."""
    return nn.Sequential(nn.Linear(width, 4 * size), nn.ReLU(), nn.Identity(), nn.Linear(4 * size, size))


class GlinerNetwork(nn.Module):
    """Encoder and head. Raises ModelError if the weights do not fit the configuration."""

    def __init__(self, card: ModelCard, dtype: torch.dtype) -> None:
        super().__init__()
        config = card.gliner
        assert config is not None
        (path,) = find_weights(card.path, card.name)
        tensors = read_tensors([path])
        self.encoder = load_encoder(card, config, tensors, dtype)
        self.head = GlinerHead(config)
        own = {name: each for name, each in tensors.items() if not name.startswith(ENCODER_PREFIX)}
        try:
            self.head.load_state_dict(own)
        except RuntimeError as error:
            raise ModelError(
                f"The weights in {path} do not match the GLiNER in its configuration: {error}"
            ) from error
        self.pad_token_id = find_pad_token_id(dict(config.encoder))
        self.requires_grad_(False).eval()

    def forward(self, tensors: Mapping[str, Tensor], num_by_turn: Tensor) -> Tensor:
        """Return the logits of the head for padded inputs and places."""
        states = self.encoder(input_ids=tensors[INPUT_IDS], attention_mask=tensors[ATTENTION_MASK])[0]
        logits: Tensor = self.head(states.float(), tensors, num_by_turn)
        return logits


def load_encoder(
    card: ModelCard, config: GlinerConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> nn.Module:
    """Return the transformer with its tensors. Raises ModelError if some are missing."""
    of_encoder = {
        name.removeprefix(ENCODER_PREFIX): each
        for name, each in tensors.items()
        if name.startswith(ENCODER_PREFIX)
    }
    options = {key: value for key, value in config.encoder.items() if key != "model_type"}
    outline = transformers.AutoConfig.for_model(config.family, **options)
    encoder = find_family(config.family).encoder
    if encoder:
        kind = getattr(transformers, encoder)
    else:
        with torch.device("meta"):
            kind = type(transformers.AutoModel.from_config(outline))
    transformers.utils.logging.disable_progress_bar()
    model, loading = kind.from_pretrained(
        None, config=outline, state_dict=of_encoder, dtype=dtype, output_loading_info=True
    )
    missing = [key for key in loading["missing_keys"] if not key.startswith(UNUSED_WEIGHTS)]
    if missing or loading["mismatched_keys"]:
        raise ModelError(
            f"The weights of model {card.name!r} lack tensors of its encoder, such as {missing[:3]}."
        )
    return prepare_transformer(model)


class GlinerEncoder(ExtractionEncoder):
    """An encoder of padded batches of a GLiNER."""

    reason = "its spans were not verified with other backends"
    attention = "padded"
    obstacle = "a GLiNER reads words and labels out of padded batches"

    def load(self, order: EncoderOrder, dtype: torch.dtype) -> nn.Module:
        network = GlinerNetwork(order.card, dtype).to(self.device)
        self.attention = f"padded ({network.encoder.config._attn_implementation})"
        self.never_waits = find_family(network.encoder.config.model_type).never_waits
        return network

    def lay_out(self, network: nn.Module, batch: Batch) -> Mapping[str, NDArray[np.int64]]:
        return pad_arrays(batch, network.pad_token_id) | find_places(batch)

    def compute(
        self, network: nn.Module, tensors: Mapping[str, Tensor], batch: Batch, room: int | None
    ) -> Tensor:
        logits = network(tensors, count_turns(batch))
        return gather_spans(logits, tensors, room)


def count_turns(batch: Batch) -> Tensor:
    """Return how many texts have a first word, a second word, and so on: int64 on the host."""
    rows = batch.inputs[WORD_MARKS]
    counts = np.add.reduceat(
        rows.covered == FIRST_OF_WORD, rows.offsets[:-1] - rows.offsets[0], dtype=np.int64
    )
    return torch.from_numpy((counts > np.arange(counts.max())[:, None]).sum(axis=1))


def gather_spans(
    logits: Tensor, tensors: Mapping[str, Tensor], room: int | None = None, *, max_cells: int = MAX_CELLS
) -> Tensor:
    """Return the numbers of all cells, as `join_cells` does: first word, last word, label and logit above 0.

    Of a blank sequence, these are the first word with each label, whatever the sign.
    """
    is_first = find_spans(tensors, logits.shape[2])
    is_first[:, 1:] = is_first[:, :, 1:] = False
    wanted = torch.where(tensors[IS_BLANK].bool().view(-1, 1, 1, 1), is_first, logits > 0)

    def read(sequences: Tensor, starts: Tensor, widths: Tensor, labels: Tensor) -> list[Tensor]:
        return [starts, starts + widths, labels, logits[sequences, starts, widths, labels]]

    return join_cells(wanted, logits.isfinite().flatten(1).all(dim=1), read, room, max_cells)
