"""RerankRequest: the body of /v1/rerank, which means the same interactively and as a line of a batch."""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from vectormill.batches.wishes import Wish
from vectormill.domain.encoding import FAIL, TRUNCATE, EncodingOptions, EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.tasks.task import JUDGE
from vectormill.models.registry import DEFAULT_MODEL

# The limit of one request, or of one line: all of them are in memory at once.
MAX_DOCUMENTS: Final = 1_000


class Document(msgspec.Struct):
    """A document as an object, of which the text is read."""

    text: str


class RerankRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /v1/rerank."""

    query: Annotated[str, Meta(examples=["how to parse a date"])]
    documents: Annotated[
        list[str | Document],
        Meta(description=f"Texts, or objects with a `text`; {MAX_DOCUMENTS:,} at the most."),
    ]
    model: str = DEFAULT_MODEL
    top_n: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Only so many of the best; else all.")
    ] = None
    return_documents: Annotated[bool, Meta(description="Repeat the texts in the answer.")] = False
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Read so many tokens of a query and a document together."),
    ] = None
    top_k: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Voyage's: `top_n`.")] = None
    truncation: Annotated[bool | None, Meta(description="Voyage's: false refuses what is too long.")] = None

    @property
    def is_voyages(self) -> bool:
        """Return whether the names are Voyage's, whose clients read `data` where others read `results`."""
        return self.top_k is not None or self.truncation is not None

    @property
    def limit(self) -> int | None:
        return self.top_n or self.top_k

    def wish(self) -> Wish:
        long_texts = FAIL if self.truncation is False else TRUNCATE
        return Wish(
            self.model, EncodingOptions(task=JUDGE, max_tokens=self.max_tokens, long_texts=long_texts)
        )

    def texts(self) -> list[str]:
        """Return what is ranked. Raises InvalidOption for a request that is not whole."""
        if None not in (self.top_n, self.top_k):
            raise InvalidOption("top_n and top_k say the same; send one of them.")
        return check_documents(read_documents(self.documents))


RERANK_DECODER: Final = msgspec.json.Decoder(RerankRequest)


def read_documents(documents: Sequence[str | Document]) -> list[str]:
    return [each if isinstance(each, str) else each.text for each in documents]


def check_documents(texts: list[str], field: str = "documents") -> list[str]:
    """Return the texts of the field. Raises InvalidOption when they are none or too many."""
    if not 1 <= len(texts) <= MAX_DOCUMENTS:
        raise InvalidOption(f"{field} must be 1 to {MAX_DOCUMENTS:,}, not {len(texts):,}.")
    return texts


def check_ranks(spec: EncodingSpec) -> None:
    """Raises InvalidOption for a classifier of which it is not said what ranks."""
    if len(spec.labels) > 2:
        raise InvalidOption(
            f"The model {spec.model!r} tells {len(spec.labels)} labels apart ({', '.join(spec.labels[:3])}, …), and "
            "which of them ranks documents is not said; use a model of one label or of two."
        )
