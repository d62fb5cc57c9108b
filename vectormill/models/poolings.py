"""The poolings: their names, and which of them a model uses by its files, by convention or by its registry entry."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vectormill.domain.errors import ModelError
from vectormill.models.embedders import describe_plain, describe_purpose, find_head
from vectormill.models.families import CONVENTIONS
from vectormill.models.model_files import ModelFiles

CLS: Final = "cls"
MEAN: Final = "mean"
MAX: Final = "max"
MEAN_SQRT_LEN: Final = "mean_sqrt_len"
WEIGHTED_MEAN: Final = "weighted_mean"
LAST_TOKEN: Final = "last_token"  # noqa: S105 - the place of a vector, not a secret

# Our names, in the order in which sentence-transformers concatenates them, with every name it has used for
# them.
POOLING_NAMES: Final = {
    CLS: ("cls", "cls_token"),
    MAX: ("max", "max_tokens"),
    MEAN: ("mean", "mean_tokens"),
    MEAN_SQRT_LEN: ("mean_sqrt_len", "mean_sqrt_len_tokens"),
    WEIGHTED_MEAN: ("weighted_mean", "weightedmean", "weightedmean_tokens"),
    LAST_TOKEN: ("last_token", "lasttoken"),
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """The modes whose vectors are concatenated, the trained head that is ignored for them, and notes on both."""

    modes: tuple[str, ...]
    unread: str = ""
    notes: tuple[str, ...] = ()
    includes_prompt: bool = True


def parse_pooling(text: str | Sequence[str]) -> tuple[str, ...]:
    """Return our names for the pooling modes of "mean", "cls+mean" or a list of names."""
    by_alias = {alias: mode for mode, aliases in POOLING_NAMES.items() for alias in aliases}
    names = text.split("+") if isinstance(text, str) else text
    for name in names:
        if name not in by_alias:
            raise ModelError(
                f"Unknown pooling {name!r}; expected one of {', '.join(POOLING_NAMES)}, or several joined by '+'."
            )
    return tuple(by_alias[name] for name in names)


def read_pooling_module(files: ModelFiles) -> Pooling:
    """Return the pooling in the second module of sentence-transformers; without any mode if it is another one."""
    if files.kinds[1:2] != ["Pooling"]:
        return Pooling(())
    config = files.require(f"{files.modules[1].folder}/config.json")
    modes = tuple(
        mode
        for mode, aliases in POOLING_NAMES.items()
        if True in [config.take(f"pooling_mode_{alias}", False) for alias in aliases]
    )
    told = parse_pooling(config.texts("pooling_mode")) or modes or (MEAN,)
    return Pooling(told, includes_prompt=config.take("include_prompt", True))


def choose_pooling(files: ModelFiles) -> Pooling:
    """Return the pooling of a model without modules.json.

    Refuse it if neither a convention nor its registry entry says how it pools.
    """
    wanted = files.pooling
    head, judges = find_head(files.headers)
    convention = CONVENTIONS.get(files.architecture)
    if convention is not None and not head:  # it would be ignored
        pooling = wanted or MEAN
        whose = "as set in VECTORMILL_MODELS" if wanted else f"by convention, because it is {convention}"
        note = f"It has no modules.json: {pooling} pooling is used {whose}."
        return Pooling(parse_pooling(pooling), notes=(note,))
    if wanted is None:
        return Pooling((MEAN,), notes=files.refuse(describe_plain(files, head)))
    purpose, reader = describe_purpose(files)
    left_out = f"; {head} is ignored" if head else ""
    note = f"It is {purpose}, used with {wanted} pooling as set in VECTORMILL_MODELS{left_out}."
    unread = head if judges else purpose if reader else ""
    return Pooling(parse_pooling(wanted), unread, (note,))
