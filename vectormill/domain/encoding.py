"""EncodingOptions, which a job requests, and EncodingSpec, which they resolve to.

Jobs with the same spec share a vector space. `make_spec` resolves the options for a model.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Final, TypedDict

from vectormill.domain.options import Help
from vectormill.domain.task import (
    ACTIVATIONS,
    DENSE,
    EMBED,
    MULTI_VECTOR,
    REPRESENTATIONS,
    SPARSE,
    TASKS,
    VECTOR,
)
from vectormill.domain.vector_type import (
    COSINE,
    DEFAULT_IN_COLLECTION,
    DEFAULT_TYPE,
    VECTOR_TYPES,
    VectorType,
)

# The model of a request that names none; it is part of the package.
DEFAULT_MODEL: Final = "all-MiniLM-L6-v2"
# The policies for a text of more than max_tokens.
TRUNCATE: Final = (
    "truncate"  # only its first tokens are encoded; the text is counted and its key can be listed
)
FAIL: Final = "fail"  # the item gets an error
PASSAGES: Final = "passages"  # overlapping windows of the text are encoded, and their vectors averaged
LATE: Final = "late"  # like passages, and an item may be a passage with the text that it is read in

LONG_TEXT_POLICIES: Final = (TRUNCATE, FAIL, PASSAGES, LATE)
# The policies that read the whole of a text, in windows.
IN_WINDOWS: Final = frozenset({PASSAGES, LATE})
# The pooling of a spec with late chunking: no model's, so that workers without it take the spec for another model's.
LATE_POOLING: Final = f"mean/{LATE}"
# The overlap of neighbouring passages as a share of max_tokens. It costs a seventh more tokens, and keeps a
# sentence of usual length complete in one of the two.
DEFAULT_PASSAGE_OVERLAP_SHARE: Final = 1 / 8


@dataclass(frozen=True, slots=True)
class EncodingOptions:
    """The options that a job asks of its model; None means the model's default."""

    normalize: Annotated[
        bool | None, Help("Normalize vectors to length 1. By default, as the model does.")
    ] = None
    dimensions: Annotated[
        int | None,
        Help(
            "Keep only the first N values of a vector (Matryoshka).",
            "Shortened vectors are normalized again.",
            metavar="N",
            least=1,
        ),
    ] = None
    prompt: Annotated[
        str | None,
        Help(
            "The name of one of the model's prompts, or a text to put before every item.",
            "Usual names are `query` and `document`; an empty string means no prompt. A late-interaction model "
            "(ColBERT) tells queries from documents by it; a generative reranker takes it as its instruction.",
            default="the model's `default_prompt_name`",
            metavar="TEXT",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        Help(
            "The maximum number of tokens that the model reads at once.",
            "Includes special tokens and the prompt.",
            default="the model's maximum",
            metavar="N",
            least=1,
        ),
    ] = None
    long_texts: Annotated[
        str | None,
        Help(
            "Truncate texts that are too long for the model, fail them one by one, read them in windows and average "
            "(passages), or read each passage within the text it was cut from (late).",
            "A text is too long if it has more than `max_tokens` tokens. `truncate`: only its first tokens are "
            "encoded, or its last ones if the tokenizer cuts at the left; it is counted in `truncated_items`, and "
            "listed by `GET /v1/jobs/{id}/truncated` and "
            "`vectormill truncated JOB`. `fail`: it gets the item error `too_many_tokens`. `passages`: overlapping "
            "windows of the text are encoded, each with the prompt, and their vectors are averaged, weighted by the "
            "tokens that each window adds; the average is then normalized and cut to `dimensions`. `late` (late "
            "chunking): an item may be a pair, a passage in `text` and the text that it was cut from in `text_pair`; "
            "its vector is the mean of the states that its tokens have in one pass over that text, or over "
            "overlapping windows. Only for models that pool by the mean.",
            default=f"`{TRUNCATE}`",
            unset=TRUNCATE,
            choices=LONG_TEXT_POLICIES,
        ),
    ] = None
    passage_overlap: Annotated[
        int | None,
        Help(
            "The number of tokens that neighbouring windows of a long text share. By default, an eighth of a window.",
            "Must be less than half of `max_tokens`.",
            default="an eighth of `max_tokens`",
            metavar="N",
            least=0,
        ),
    ] = None
    vector_type: Annotated[
        str | None,
        Help(
            "The type of a vector's numbers. "
            f"By default, {DEFAULT_IN_COLLECTION.name} in a collection and {DEFAULT_TYPE.name} otherwise.",
            f"One of {', '.join(f'`{name}`' for name in VECTOR_TYPES)}. "
            f"{'; '.join(kind.note for kind in VECTOR_TYPES.values() if kind.note)}.",
            default=f"`{DEFAULT_IN_COLLECTION.name}` in a collection, `{DEFAULT_TYPE.name}` otherwise",
            choices=tuple(VECTOR_TYPES),
        ),
    ] = None
    outputs: Annotated[
        str | None,
        Help(
            "The outputs to compute in one pass, separated by commas: dense, sparse and multi_vector.",
            "`dense`: a vector for each text. `sparse`: a weight for each word of the vocabulary, most of them 0. "
            "`multi_vector`: a vector for each token. `GET /v1/models` lists the outputs of each model.",
            default="the first output of the model",
            metavar="LIST",
        ),
    ] = None
    task: Annotated[
        str | None,
        Help(
            "The kind of result to compute. By default, the model's own.",
            "".join(f"`{task.name}`: {task.does}. " for task in TASKS.values())
            + "A classifier scores pairs (`text` and `text_pair`) and single texts; an embedding model scores only "
            "pairs, by the cosine of their vectors.",
            default="what the model is for",
            choices=tuple(TASKS),
        ),
    ] = None
    activation: Annotated[
        str | None,
        Help(
            "The function applied to a classifier's outputs. By default, the model's own.",
            "`softmax` for mutually exclusive labels, `sigmoid` for independent labels, `tanh` from -1 to 1, "
            "`raw` for no function.",
            choices=ACTIVATIONS,
        ),
    ] = None
    extract_schema: Annotated[
        str | None,
        Help(
            "The schema of what to extract, as JSON; required for the task extract.",
            'An object that maps each type to null or to its nested types: `{"person": {"born in": null}}`.',
            default="none; required for the task `extract`",
            metavar="JSON",
        ),
    ] = None
    confidences: Annotated[
        bool | None,
        Help("Add the model's confidence to each span, and all labels to a classified text.", default="no"),
    ] = None

    @property
    def reads_pairs(self) -> bool:
        """Return True if an item may be a pair of texts."""
        return TASKS[self.task or EMBED].reads_pairs or self.long_texts == LATE


@dataclass(frozen=True, slots=True)
class RequestedOptions(EncodingOptions):
    """The options as a client may name them: one of them also has an older name."""

    truncate: Annotated[
        bool | None,
        Help(
            "The older name of long_texts.",
            "True means `truncate`, false means `fail`.",
            default="unset",
            is_older_name=True,
        ),
    ] = None

    def resolve(self) -> EncodingOptions:
        """Return the options under their current names.

        Raise ValueError if an option has two different values.
        """
        given = asdict(self)
        truncate = given.pop("truncate")
        if truncate is None:
            return EncodingOptions(**given)
        said = TRUNCATE if truncate else FAIL
        if self.long_texts not in (None, said):
            raise ValueError(
                f"truncate={str(truncate).lower()} means long_texts={said}, which contradicts "
                f"long_texts={self.long_texts}; leave out truncate, the older name"
            )
        return EncodingOptions(**given | {"long_texts": said})


class OptionArguments(TypedDict, total=False):
    """EncodingOptions as keyword arguments, for editors and type checkers only.

    Generated by `python -m tests.architecture.derived`.
    """

    # <options>
    normalize: bool | None
    dimensions: int | None
    prompt: str | None
    max_tokens: int | None
    long_texts: str | None
    passage_overlap: int | None
    vector_type: str | None
    outputs: str | None
    task: str | None
    activation: str | None
    extract_schema: str | None
    confidences: bool | None
    # <end>


class RequestedArguments(OptionArguments, total=False):
    """RequestedOptions as keyword arguments, for editors and type checkers only."""

    truncate: bool | None


@dataclass(frozen=True, slots=True)
class EncodingSpec:
    """The way in which texts become vectors; a value, compared and hashed by content.

    `dimensions` is the length of the stored vector; if it is smaller than the model's own, the leading values
    are kept (Matryoshka) and normalized again if `normalize` is set. `prompt` is the literal text put before
    every item, never the name of a prompt. `max_tokens` includes special tokens and the prompt. `long_texts`
    is the policy for longer texts, one of LONG_TEXT_POLICIES; `passage_overlap` is in tokens, and 0 unless
    texts are read in windows. With the policy `late`, `pooling` is LATE_POOLING. `vector_type`
    is one of VECTOR_TYPES; None means float16 in a collection, and float32 elsewhere.

    `outputs` are some of OUTPUTS, in their order and joined by commas. Without `dense`, `dimensions` is 0 and
    `normalize` False. `sparse_dimensions` is the size of the vocabulary that sparse weights belong to, and
    `token_dimensions` the length of the vectors of tokens; each is 0 without its output.

    For the task `score`, `dimensions` is the number of results for an item: for a classifier one for each of
    `labels`, computed from its outputs by `activation`. For the task `extract`, `extract_schema` says what is
    extracted, as JSON in canonical form, and `dimensions` is 0.

    `similarity`, COSINE or DOT, is how a collection compares dense vectors. It does not change any, so it is no part of
    the vector space: a collection keeps the one with which its generation began.

    `aliases` are former names of `revision` in a spec that was just made of a model's card. They are not stored.
    """

    model: str
    revision: str
    pooling: str
    normalize: bool
    dimensions: int
    prompt: str
    max_tokens: int
    long_texts: str = TRUNCATE
    passage_overlap: int = 0
    vector_type: str | None = None
    task: str = EMBED
    labels: tuple[str, ...] = ()
    activation: str = ""
    extract_schema: str = ""
    confidences: bool = False
    outputs: str = DENSE
    sparse_dimensions: int = 0
    token_dimensions: int = 0
    similarity: str = COSINE
    aliases: tuple[str, ...] = field(default=(), compare=False)

    @property
    def result(self) -> str:
        """Return the kind of result that an item gets: a vector, a score, a record or several representations."""
        return TASKS[self.task].result if self.outputs == DENSE else REPRESENTATIONS

    @property
    def kept_type(self) -> VectorType:
        """Return the type of the numbers that a collection keeps: the requested one. Scores are float32 everywhere."""
        usual = DEFAULT_IN_COLLECTION if TASKS[self.task].result == VECTOR else DEFAULT_TYPE
        return VECTOR_TYPES[self.vector_type or usual.name]

    @property
    def delivered_type(self) -> VectorType:
        """Return the type of the numbers that a job without a collection keeps, and that every binary export has."""
        return VECTOR_TYPES[self.vector_type or DEFAULT_TYPE.name]

    @property
    def model_pooling(self) -> str:
        """Return the pooling that the model's card has."""
        return self.pooling.removesuffix(f"/{LATE}")

    @property
    def reads_pairs(self) -> bool:
        """Return True if an item may be a pair of texts."""
        return TASKS[self.task].reads_pairs or self.long_texts == LATE

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Return the columns in which a collection keeps an item's text: two if items may be pairs."""
        return ("text", "text_pair") if self.reads_pairs else ("text",)

    def has_output(self, name: str) -> bool:
        """Return True if items get this output, one of OUTPUTS; False for the results of other tasks than `embed`."""
        return self.task == EMBED and name in self.outputs.split(",")

    def builds_as(self, other: "EncodingSpec") -> bool:
        """Return True if a generation of this spec is one of the other: of equal vectors, which it compares alike."""
        return (self.fingerprint(), self.similarity) == (other.fingerprint(), other.similarity)

    def narrow(self, outputs: Sequence[str]) -> "EncodingSpec":
        """Return the spec that gives only these of its outputs, in the order of OUTPUTS."""
        has_dense = DENSE in outputs
        return replace(
            self,
            outputs=",".join(outputs),
            dimensions=self.dimensions if has_dense else 0,
            normalize=self.normalize and has_dense,
            vector_type=self.vector_type if has_dense else None,
            similarity=self.similarity if has_dense else COSINE,
            sparse_dimensions=self.sparse_dimensions if SPARSE in outputs else 0,
            token_dimensions=self.token_dimensions if MULTI_VECTOR in outputs else 0,
        )

    def adopt(self, live: "EncodingSpec") -> "EncodingSpec":
        """Return the spec under the live one's revision if that is a former name of its own, so that both compare."""
        return replace(self, revision=live.revision) if live.revision in self.aliases else self

    def vector_space(self) -> dict[str, Any]:
        """Return the fields that the fingerprint is computed from.

        Their bytes must never change for a spec that a release could write. Windows change the vectors of
        long texts, so they are included; truncating and failing only decide which texts get a vector, so they
        are not. The vector type is left out if it is unset, or the default of
        collections.
        """
        space = {
            "model": self.model,
            "revision": self.revision,
            "pooling": self.pooling,
            "normalize": self.normalize,
            "dimensions": self.dimensions,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
        }
        if self.long_texts in IN_WINDOWS:
            space |= {"long_texts": self.long_texts, "passage_overlap": self.passage_overlap}
        if self.task != EMBED:
            space |= self._of_task()
        if self.outputs != DENSE:
            space |= self._of_outputs()
        return (
            space
            if self.vector_type in (None, DEFAULT_IN_COLLECTION.name)
            else {**space, "vector_type": self.vector_type}
        )

    def fingerprint(self) -> str:
        """Return the sixteen hex digits that name the vector space."""
        text = json.dumps(self.vector_space(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def content(self) -> dict[str, Any]:
        """Return all that decides the outcome of a job, for the hash of an Idempotency-Key."""
        # A request that is repeated after an upgrade was hashed with the former name.
        space = self.vector_space() | {"revision": (*self.aliases, self.revision)[0]}
        return {**space, "long_texts": self.long_texts, "vector_type": self.vector_type}

    def to_json(self) -> dict[str, Any]:
        """Return the stored form: all fields, but those of other tasks and other outputs only where they are used."""
        values = {**asdict(self), "labels": list(self.labels)}
        hidden = {"aliases": self.aliases} | (self._of_task() if self.task == EMBED else {})
        if self.outputs == DENSE:
            hidden |= self._of_outputs()
        if self.similarity == COSINE:
            hidden["similarity"] = COSINE
        return {name: value for name, value in values.items() if name not in hidden}

    def describe(self) -> dict[str, Any]:
        """Return the fields as clients know them, including `truncate`, the older name of `long_texts`."""
        return {**self.to_json(), "truncate": self.long_texts != FAIL}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "EncodingSpec":
        """Return the spec from its stored form, ignoring fields that a later release has added."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**{**known, "labels": tuple(known.get("labels", ())), "aliases": ()})

    def _of_task(self) -> dict[str, Any]:
        """Return the fields that only tasks other than `embed` have."""
        return {
            "task": self.task,
            "labels": list(self.labels),
            "activation": self.activation,
            "extract_schema": self.extract_schema,
            "confidences": self.confidences,
        }

    def _of_outputs(self) -> dict[str, Any]:
        """Return the fields that only encodings with other outputs than `dense` have."""
        return {
            "outputs": self.outputs,
            "sparse_dimensions": self.sparse_dimensions,
            "token_dimensions": self.token_dimensions,
        }


def find_result(described: Mapping[str, Any]) -> str:
    """Return the kind of result of a spec that `EncodingSpec.describe` has described."""
    if described.get("outputs", DENSE) != DENSE:
        return REPRESENTATIONS
    return TASKS[described.get("task", EMBED)].result
