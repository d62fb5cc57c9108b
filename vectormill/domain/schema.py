"""The schema of an extract job: the types to extract, and the types nested in them.

Its form is that of RexUniNLU: an object whose names are types, each with null (a leaf) or with an object of
the types that are extracted for every span found of it, such as `{"机构": {"创办人(人物)": null}, "时间": null}`.
Nothing here depends on a model.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from vectormill.domain.errors import InvalidOption

# The children of each type; None for a leaf.
Schema = dict[str, "Schema | None"]

MAX_DEPTH: Final = 8  # each level needs another forward pass, and multiplies the spans of the previous one
MAX_TYPES: Final = 512  # in the whole schema
# A type is read, with its special token, within 125 tokens, and a longer one would silently be left out. A
# Chinese character is one token; several Latin letters share one.
MAX_TYPE_CHARS: Final = 120
# The limit for the schema as JSON: twice the size of MAX_TYPES of the longest types with every character
# escaped.
MAX_SCHEMA_CHARS: Final = 1 << 20
# The special tokens that prompts are built of. A type that contained one would be read as structure; the last
# one joins types to a path.
RESERVED_TOKENS: Final = (
    "[CLS]",
    "[SEP]",
    "[PAD]",
    "[UNK]",
    "[MASK]",
    "[PREFIX]",
    "[TYPE]",
    "[CLASSIFY]",
    "[MULTICLASSIFY]",
    "[INFOKEY]",
)


def parse_schema(content: str) -> Schema:
    """Parse a schema from JSON and check it with check_schema. Raise InvalidOption."""
    if len(content) > MAX_SCHEMA_CHARS:
        raise InvalidOption(
            f"schema: the JSON has {len(content)} characters; at most {MAX_SCHEMA_CHARS} are allowed."
        )
    try:
        return check_schema(json.loads(content, object_pairs_hook=_Object))
    except RecursionError:
        raise InvalidOption(
            f"schema: the JSON is nested too deeply; at most {MAX_DEPTH} levels of types are allowed."
        ) from None
    except ValueError as error:
        raise InvalidOption(f"schema: not valid JSON: {error}.") from error


class _Object(dict[str, object]):
    """A JSON object that remembers duplicate names, of which otherwise the last would win silently."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        names = Counter(name for name, _ in pairs) if len(self) < len(pairs) else Counter[str]()
        self.repeated = next((name for name, count in names.items() if count > 1), None)


def check_schema(schema: object) -> Schema:
    """Return the schema with its types in the order of their code points, and `{}` replaced by None.

    Raise InvalidOption, with a message that names the path: "schema.人物.出生地: …".
    """
    checked = _check_types(schema, "schema", 1)
    if checked is None:
        raise InvalidOption('schema: must name at least one type, for example {"人物": null, "地点": null}.')
    num_types = sum(1 for _ in list_types(checked))
    if num_types > MAX_TYPES:
        raise InvalidOption(
            f"schema: has {num_types} types; at most {MAX_TYPES} are allowed. Split it into several jobs."
        )
    return checked


def list_types(schema: Schema, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """List each type as its path from the root, parents before their children."""
    for name, children in schema.items():
        yield (*above, name)
        yield from list_types(children or {}, (*above, name))


def list_leaves(schema: Schema | None, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """List the paths, from the root, of the types that have no children."""
    if not schema:
        yield above
        return
    for name, children in schema.items():
        yield from list_leaves(children, (*above, name))


def _check_types(types: object, place: str, depth: int) -> Schema | None:
    if types is None:
        return None
    if not isinstance(types, Mapping):
        raise InvalidOption(f"{place}: must be null or an object of nested types; got {_describe(types)}.")
    if types and depth > MAX_DEPTH:
        raise InvalidOption(f"{place}: has types at depth {depth}; at most {MAX_DEPTH} levels are allowed.")
    for name in types:
        _check_name(name, place)
    if isinstance(types, _Object) and types.repeated is not None:
        raise InvalidOption(
            f"{place}.{types.repeated}: duplicate type; each name may occur only once in an object."
        )
    return {name: _check_types(types[name], f"{place}.{name}", depth + 1) for name in sorted(types)} or None


def _check_name(name: object, place: str) -> None:
    if not isinstance(name, str):
        raise InvalidOption(f"{place}: names of types must be strings; got {_describe(name)}.")
    if "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
        raise InvalidOption(
            f"{place}.{name[:20]!r}: contains a NUL character or an unpaired surrogate, which cannot be stored."
        )
    here = f"{place}.{name}"
    if not name.strip():
        raise InvalidOption(f"{place}: the name of a type must not be empty; got {name!r}.")
    if name != name.strip():
        # The reference implementation strips parents before it looks for a path in the schema, and then finds
        # none.
        raise InvalidOption(f"{here}: must not begin or end with whitespace; use {name.strip()!r}.")
    if len(name) > MAX_TYPE_CHARS:
        raise InvalidOption(
            f"{place}.{name[:20]}…: the name has {len(name)} characters; at most {MAX_TYPE_CHARS} are allowed."
        )
    for token in RESERVED_TOKENS:
        if token in name:
            raise InvalidOption(f"{here}: contains the reserved token {token}; use another name.")


def _describe(value: object) -> str:
    return f"{type(value).__name__} {value!r}"[:60]


# A sequence is [CLS] hint [SEP] part of the text [SEP].
MAX_WINDOW_TOKENS: Final = 512
FRAME_TOKENS: Final = 3
# The number of tokens that a window shares with the previous one.
WINDOW_STRIDE: Final = 32
# The largest number of tokens of a hint, including [CLS], [SEP], and the special token of each path or type.
MAX_HINT_COST: Final = 256
EMPTY_HINT_COST: Final = 2
# The assumed tokens of a span and of what joins it to its type: a name of a few words.
SPAN_TOKENS: Final = 6


class PromptEstimate:
    """An estimator of the tokens of a schema's prompts; `count` returns how many tokens a type has."""

    def __init__(self, schema: Schema, count: Callable[[bytes], int]) -> None:
        self._hints = [cost - EMPTY_HINT_COST for cost in _list_hint_costs(schema, count)]

    def of(self, num_text_tokens: int) -> int:
        """Return the estimated tokens of all sequences for a text of this many tokens."""
        return sum(count_window_tokens(hint, num_text_tokens) for hint in self._hints)


def count_window_tokens(num_hint_tokens: int, num_text_tokens: int) -> int:
    """Return the number of tokens of all windows of a text with one hint."""
    room = max(WINDOW_STRIDE + 1, MAX_WINDOW_TOKENS - num_hint_tokens - FRAME_TOKENS)
    num_windows = -(-max(1, num_text_tokens - WINDOW_STRIDE) // (room - WINDOW_STRIDE))
    again = (num_windows - 1) * WINDOW_STRIDE
    return num_windows * (num_hint_tokens + FRAME_TOKENS) + num_text_tokens + again


def _list_hint_costs(schema: Schema, count: Callable[[bytes], int]) -> Iterator[int]:
    """List the cost of every hint of every level, assuming one span for each type that has children."""
    level: list[tuple[int, Schema]] = [(0, schema)]
    while level:
        below: list[tuple[int, Schema]] = []
        cost = EMPTY_HINT_COST
        for path_tokens, types in level:
            is_first = True
            for name, children in types.items():
                name_tokens = count(name.encode())
                opening = 1 + path_tokens if is_first else 0
                if cost > EMPTY_HINT_COST and cost + opening + 1 + name_tokens > MAX_HINT_COST:
                    yield cost
                    cost, opening = EMPTY_HINT_COST, 1 + path_tokens
                cost += opening + 1 + name_tokens
                is_first = False
                if children:
                    below.append((path_tokens + name_tokens + SPAN_TOKENS, children))
        yield cost
        level = below
