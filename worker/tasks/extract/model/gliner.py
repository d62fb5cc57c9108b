"""Run a GLiNER with torch on one device, and return the spans whose probability exceeds a half.

The encoder is transformers' own. Behind it, in fp32: the states of each word's first token and of each label, an
LSTM over the words, and a logit for each span of words and each label. Modules are named as the weights are.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from vectormill.domain.errors import ModelError
from vectormill.models.families import find_family
from vectormill.models.gliner import ENCODER_PREFIX, GlinerConfig, read_gliner_config
from vectormill.models.model_card import ModelCard
from vectormill.models.weights import find_weights
from vectormill.ragged import Ragged
from worker.batching.batch import WORD_MARKS, Batch
from worker.model.network import UNUSED_WEIGHTS, find_pad_token_id, prepare_transformer
from worker.model.runtime import transformers
from worker.model.weights import open_weights
from worker.tasks.extract.gliner import FIRST_OF_WORD, STANDS_FOR_LABEL
from worker.tasks.extract.model.encoder import ExtractionEncoder
from worker.tasks.extract.model.head import MAX_CELLS, lay_rows, pad_inputs
from worker.tasks.extract.records import NON_FINITE_ROW
from worker.tokens.tokenized import INPUT_IDS

NEVER: Final = -1.0  # the logit of a span that would end behind the text


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

    def forward(self, states: Tensor, marks: Tensor) -> list[Tensor]:
        """Return the logits [words, widths, labels] of each sequence; states are [n, length, hidden]."""
        is_word, is_label = marks == FIRST_OF_WORD, marks == STANDS_FOR_LABEL
        word_counts, label_counts = is_word.sum(dim=1).tolist(), is_label.sum(dim=1).tolist()
        words, labels = states[is_word], states[is_label]  # [all words, hidden], [all labels, hidden]
        if self.token_rep_layer:
            words, labels = (self.token_rep_layer["projection"](each) for each in (words, labels))
        if self.rnn:
            words = self._run_rnn(words, word_counts)
        spans = self.span_rep_layer["span_rep_layer"]
        # `out_project` of a start beside an end, whose second layer is then multiplied with each label: its first
        # layer is applied to starts and ends before they are paired, its second layer to the few labels.
        wide, _, _, narrow = spans["out_project"]
        of_start, of_end = wide.weight.chunk(2, dim=1)
        starts = linear(relu(spans["project_start"](words)), of_start).split(word_counts)
        ends = linear(relu(spans["project_end"](words)), of_end, wide.bias).split(word_counts)
        labels = self.prompt_rep_layer(labels)
        weights, biases = (
            (labels @ narrow.weight).split(label_counts),
            (labels @ narrow.bias).split(label_counts),
        )
        return [self._score(*each) for each in zip(starts, ends, weights, biases, strict=True)]

    def _run_rnn(self, words: Tensor, counts: list[int]) -> Tensor:
        padded = pad_sequence(list(words.split(counts)), batch_first=True)
        packed = pack_padded_sequence(padded, torch.tensor(counts), batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(self.rnn["lstm"](packed)[0], batch_first=True)
        return torch.cat([row[:count] for row, count in zip(found, counts, strict=True)])

    def _score(self, starts: Tensor, ends: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
        num_words = len(starts)
        logits = starts.new_full((num_words, self.max_width, len(biases)), NEVER)
        for width in range(min(self.max_width, num_words)):
            pairs = relu(starts[: num_words - width] + ends[width:])
            logits[: num_words - width, width] = linear(pairs, weights, biases)
        return logits


def _project(width: int, size: int) -> nn.Sequential:
    """Return the package's `create_projection_layer`; the identity stands where it has a dropout."""
    return nn.Sequential(nn.Linear(width, 4 * size), nn.ReLU(), nn.Identity(), nn.Linear(4 * size, size))


class GlinerNetwork(nn.Module):
    """Encoder and head. Raises ModelError if the weights do not fit the configuration."""

    def __init__(self, card: ModelCard, dtype: torch.dtype) -> None:
        super().__init__()
        config = read_gliner_config(card.name, card.path)
        (path,) = find_weights(card.path, card.name)
        with open_weights(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
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

    def forward(self, input_ids: Tensor, attention_mask: Tensor, word_marks: Tensor) -> list[Tensor]:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        logits: list[Tensor] = self.head(states.float(), word_marks)
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

    def load(self, card: ModelCard, dtype: torch.dtype) -> nn.Module:
        network = GlinerNetwork(card, dtype).to(self.device)
        self.attention = f"padded ({network.encoder.config._attn_implementation})"
        return network

    def compute(self, network: nn.Module, batch: Batch) -> Ragged:
        inputs = pad_inputs(batch, self.device, network.pad_token_id)
        with torch.inference_mode():
            answers = network(inputs.tokens[INPUT_IDS], inputs.is_token.long(), inputs.tokens[WORD_MARKS])
            return find_spans(answers, inputs.is_blank)


def find_spans(answers: list[Tensor], is_blank: Tensor, max_cells: int = MAX_CELLS) -> Ragged:
    """Return a row of cells for each sequence: first word, last word, label and logit of each span above 0.

    Of a blank sequence, these are the first word with each label, whatever the sign.
    """
    cells = []
    for logits, blank in zip(answers, is_blank.tolist(), strict=True):
        wanted = logits > 0
        if blank:
            wanted = torch.zeros_like(wanted)
            wanted[0, 0] = True
        starts, widths, labels = wanted.nonzero(as_tuple=True)
        cells.append(torch.stack([starts, starts + widths, labels, logits[wanted]], dim=1).float())
    counts = torch.tensor([len(each) for each in cells])
    is_finite = torch.stack([each.isfinite().all() for each in answers]).cpu()
    is_sent = is_finite & (counts <= max_cells)
    sent = [each for each, is_one in zip(cells, is_sent.tolist(), strict=True) if is_one]
    return lay_rows(
        torch.where(is_finite, counts.float(), NON_FINITE_ROW).numpy(),
        torch.where(is_sent, counts, 0).numpy(),
        torch.cat([*sent, torch.zeros(0, 4)]).flatten().cpu().numpy(),
    )
