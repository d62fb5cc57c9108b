"""The card of a model: what is known of it before its weights are loaded. Reads nothing and imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vectormill.domain.task import DENSE
from vectormill.models.adapters import Adapter
from vectormill.models.classifiers import Classifier
from vectormill.models.heads import SparseHead, TokenHead

# The authors' names of extractors.
REXUNINLU: Final = "RexUniNLU"
GLINER: Final = "GLiNER"


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

    `pooling` holds the names from POOLING_NAMES whose vectors are concatenated. `dense` names the folders of
    the Dense modules that follow, relative to `path`. `dimension` is the length of the vectors after both.
    `default_prompt` is the prompt's text. A model with a `classifier` returns a number for each label instead
    of a vector: `dimension` is their count, and `pooling` is the state that its head reads. An `extractor`,
    REXUNINLU or GLINER, returns records and has dimension 0. `outputs` are what an embedding model can compute,
    the usual one first: `dimension` is the length of dense vectors, `sparse_dimensions` the size of the
    vocabulary that sparse weights belong to, and `token_dimensions` the length of the vectors of tokens;
    `sparse_head` and `token_head` say how these are made. A model with a `static` table has no transformer.
    `model_type` names its family in `families`, and is empty if its layout has none. `unread` names the trained
    head that is ignored because the user gave a pooling. `unprompted` is a warning about texts encoded without a
    prompt, if the authors want one. `notes` are sentences for people.
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
    dense: tuple[str, ...] = ()
    lowercase: bool = False
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
    unread: str = ""
    unprompted: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_extractor(self) -> bool:
        return bool(self.extractor)
