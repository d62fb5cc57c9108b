"""The card of a model: what is known of it before its weights are loaded. Reads nothing and imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.domain.task import DENSE
from vectormill.domain.vector_type import COSINE
from vectormill.models.model_shape import ModelShape
from vectormill.models.rerankers import Template

# The authors' names of extractors.
REXUNINLU: Final = "RexUniNLU"
GLINER: Final = "GLiNER"
# The sizes without which nothing can be predicted, with their names in config.json.
SIZES: Final = {
    "hidden_size": "hidden_size", "num_heads": "num_attention_heads", "num_layers": "num_hidden_layers",
    "intermediate_size": "intermediate_size",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Adapter:
    """The folder of an adapter, relative to the model's directory, and the factor of its products."""

    folder: str
    scaling: float


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A module Dense of sentence-transformers: a linear layer, an activation and maybe a residual connection.

    `folder` has its weights, and `activation` is the name of a class of torch.nn.
    """

    folder: str
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: str
    has_residual: bool

    @property
    def num_values(self) -> int:
        num_matrices = 1 + (self.has_residual and self.num_inputs != self.num_outputs)
        return self.num_outputs * (num_matrices * self.num_inputs + self.has_bias)


@dataclass(frozen=True, slots=True)
class Classifier:
    """The labels in the order of the head's outputs, and the activation applied to these.

    A reranker with a `template` reads pairs alone, put into words.
    """

    architecture: str
    pooling: str
    labels: tuple[str, ...]
    activation: str
    template: Template | None = None

    @property
    def num_words(self) -> int:
        """Return the number of words whose logits are the score; 0 for a head of the model's own."""
        return 0 if self.template is None else len(self.template.words)


@dataclass(frozen=True, slots=True)
class SparseHead:
    """How a model gives weights to the words of its vocabulary.

    Either `file` holds a linear layer that gives each token its own weight (bge-m3), of which those of the tokens
    `left_out` do not count; or, without a file, the language model's head gives each token a number for each word
    (SPLADE). Such a word's weight is the largest of all tokens, or their sum, after log(1 + x) was applied
    `num_logs` times to the positive numbers.
    """

    file: str = ""
    left_out: tuple[int, ...] = ()
    sums: bool = False
    num_logs: int = 1


@dataclass(frozen=True, slots=True)
class TokenHead:
    """How a model gives a vector to each token of a text: by Dense modules, or by one linear layer.

    `dense` are the Dense modules; without any, `file` holds the layer, whose tensors' names begin with `prefix`. An
    empty `file` means the model's own weights. `skips_first` leaves out the vector of the first token, and `skiplist`
    those of certain tokens, in queries too if `skips_in_queries`.

    Texts whose prompt begins with `query_prompt` are queries. `markers` are prompts that stand for one token each,
    which is inserted behind the special tokens before a text. A query has at most `most_query_tokens` and at least
    `fewest_query_tokens`, filled with the token `filler`; 0 means no such bound. No token attends to the fillers
    unless `attends`.
    """

    dense: tuple[DenseLayer, ...] = ()
    file: str = ""
    prefix: str = ""
    normalizes: bool = True
    skips_first: bool = False
    skiplist: tuple[int, ...] = ()
    skips_in_queries: bool = False
    query_prompt: str = ""
    markers: tuple[tuple[str, int], ...] = ()
    most_query_tokens: int = 0
    fewest_query_tokens: int = 0
    filler: int = 0
    attends: bool = False

    @property
    def unattended(self) -> int | None:
        """Return the token at the end of a text that no token attends to; None if all are attended to."""
        return self.filler if self.fewest_query_tokens and not self.attends else None

    def is_query(self, prompt: str) -> bool:
        return bool(self.query_prompt) and prompt.startswith(self.query_prompt)

    def split_prompt(self, prompt: str) -> tuple[int | None, str]:
        """Return the token that a prompt begins with, if it begins with a marker, and the rest of the prompt."""
        for text, token in self.markers:
            if prompt.startswith(text):
                return token, prompt.removeprefix(text)
        return None, prompt


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens before and after a text.

    `is_rewritten` means that the template in tokenizer.json lacks some of them.
    """

    prefix: tuple[str, ...] = ()
    suffix: tuple[str, ...] = ()
    is_rewritten: bool = False
    flags: tuple[tuple[str, bool], ...] = ()  # settings that make transformers' own class do the same
    has_code: bool = False  # custom code of a known kind, which is never run


@dataclass(frozen=True, slots=True)
class GlinerConfig:
    """The properties in which one GLiNER differs from another.

    `encoder` is the configuration of the transformer. A span has at most `max_width` words, and a window `max_words`.
    Each label follows a `marker`, whose hidden state represents it, or with `reads_label` that of the token behind
    it; `separator` follows the last label.
    """

    encoder: Mapping[str, Any]
    hidden_size: int
    max_width: int
    max_words: int
    num_rnn_layers: int
    marker: str
    separator: str
    reads_label: bool

    @property
    def family(self) -> str:
        return str(self.encoder["model_type"])

    @property
    def has_positions(self) -> bool:
        """Return True unless positions are relative, so that any number of tokens can be read."""
        return self.family != "deberta-v2" or bool(self.encoder.get("position_biased_input", True))


class TableMissing(LookupError):
    """The table of a model of static embeddings was not fetched yet, and nothing else tells their dimension."""


@dataclass(frozen=True, slots=True)
class StaticTable:
    """A table of static embeddings in `folder`, relative to the model's directory, beside its tokenizer.

    `is_model2vec` means that model2vec's rules hold: unknown tokens are left out, and a long text is cut to a
    number of characters before it is tokenized. `num_values` is the size of the table.
    """

    folder: str
    is_model2vec: bool
    num_values: int


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The facts about a model that are known before its weights are loaded.

    `pooling` holds the names from POOLING_NAMES whose vectors are concatenated. `dense` are the Dense modules that
    follow, in folders relative to `path`. `dimension` is the length of the vectors after both, of which a job gets the
    first `default_dimensions` unless it asks for another number; 0 means all. Of a text that is too long, the beginning
    is left out if the model `truncates_left`, else the end. `default_prompt` is the prompt's text.

    A model with a `classifier` returns a number for each label instead of a vector: `dimension` is their count, and
    `pooling` is the state that its head reads. An `extractor`, REXUNINLU or GLINER, returns records and has dimension
    0; `gliner` is the configuration of the latter. `outputs` are what an embedding model can compute, the usual one
    first: `dimension` is the length of dense vectors, `sparse_dimensions` the size of the vocabulary that sparse
    weights belong to, and `token_dimensions` the length of the vectors of tokens; `sparse_head` and `token_head` say
    how these are made. A model with a `static` table has no transformer.

    `special` are the special tokens around a text, and `shape` is what plans need. `model_type` names its family in
    `families`, and is empty if its layout has none. `unread` names the trained head that is ignored because the user
    gave a pooling. `unprompted` is a warning about texts encoded without a prompt, if the authors want one, and
    `similarity` is how they compare vectors, COSINE or DOT. `notes` are sentences for people. `named` are facts that
    come from the name of the model's directory instead of a file, so that the revision ends with them. `flaws` say
    which settings of its files cannot be honoured, so that no new job is accepted, and `settings` are those that are,
    each with its file.

    `aliases` are former names of `revision`, under which specs of this model may be stored. `rereads` are sentences
    about settings of the model's files that former releases skipped, and that change vectors.
    """

    name: str
    path: Path
    revision: str
    architecture: str
    dimension: int
    max_tokens: int
    pooling: tuple[str, ...]
    normalize: bool
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    include_prompt: bool = True
    dense: tuple[DenseLayer, ...] = ()
    default_dimensions: int = 0
    lowercase: bool = False
    truncates_left: bool = False
    num_parameters: int | None = None
    classifier: Classifier | None = None
    extractor: str = ""
    outputs: tuple[str, ...] = (DENSE,)
    sparse_dimensions: int = 0
    token_dimensions: int = 0
    sparse_head: SparseHead | None = None
    token_head: TokenHead | None = None
    model_type: str = ""
    adapter: Adapter | None = None
    static: StaticTable | None = None
    gliner: GlinerConfig | None = None
    special: SpecialTokens = SpecialTokens()
    shape: ModelShape = field(default_factory=ModelShape)
    similarity: str = COSINE
    unread: str = ""
    unprompted: str = ""
    notes: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    flaws: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    rereads: tuple[str, ...] = ()

    @property
    def revisions(self) -> tuple[str, ...]:
        """Return the revision and its former names: those of the specs that this model can encode."""
        return (self.revision, *self.aliases)

    def reads_as_before(self, revision: str) -> bool:
        """Return True if the vectors of this revision are those without the settings that `rereads` is about."""
        return bool(self.rereads) and revision in self.aliases

    @property
    def is_extractor(self) -> bool:
        return bool(self.extractor)

    def require_honoured(self) -> None:
        """Raise UnsupportedModel if its files have a setting that cannot be honoured, with the file and the setting."""
        if self.flaws:
            raise UnsupportedModel(
                f"The model {self.name!r} would give other results than its authors' code: {' '.join(self.flaws)} To "
                "use it without these settings, remove them in a copy of its directory, and add that."
            )

    def find_shape(self, shapes: Mapping[str, tuple[int, ...]] | None = None) -> ModelShape:
        """Return the shape, with the tensors of these `shapes` by name if the weights are not here.

        Raise ModelError if the model's files leave a size out.
        """
        for name, key in SIZES.items():
            if self.static is None and not getattr(self.shape, name):
                raise ModelError(
                    f"The config.json of model {self.name!r} has no {key}, so the model's memory cannot be predicted."
                )
        has_head = self.classifier is not None and not self.classifier.num_words
        return self.shape if shapes is None else self.shape.fill(shapes, has_head=has_head)
