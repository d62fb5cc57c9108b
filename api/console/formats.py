"""Formats: numbers, times and sentences as the console writes them. All functions are pure."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from markupsafe import Markup, escape

from vectormill.collections.collection import GENERATION_STATE_BY_NAME
from vectormill.domain.states import BAD, GOOD
from vectormill.jobs.bottleneck import COLLATE, COLLECT, LOAD, PERSIST, QUEUE, RUN, TOKENIZE, WAIT
from vectormill.jobs.job import JOB_STATE_BY_NAME
from vectormill.runs.run import RUN_STATE_BY_NAME

NOTHING: Final = "–"
MINUTE: Final = 60
HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR
MOST_SHOWN_CHARS: Final = 600
# A stage of a chunk, or what limits a job, for a reader who does not know the code.
STAGE_WORDS: Final = {
    LOAD: "reading texts",
    TOKENIZE: "tokenizer",
    WAIT: "waiting for the device",
    COLLATE: "building batches",
    RUN: "model",
    COLLECT: "copying results",
    PERSIST: "writing results",
    QUEUE: "no chunk at a worker",
}

# A state that two things can be in has the same tone for both. Indexes and schedules have no table of states.
TONES: Final = {
    state.name: state.tone
    for state in (
        *JOB_STATE_BY_NAME.values(),
        *RUN_STATE_BY_NAME.values(),
        *GENERATION_STATE_BY_NAME.values(),
    )
} | {"ready": GOOD, "on_time": GOOD, "invalid": BAD, "late": BAD}


def format_count(number: float | None) -> str:
    """Format a count, such as 12,345."""
    return NOTHING if number is None else f"{number:,.0f}"


def format_rounded(number: float) -> str:
    """Format a number rounded to one significant digit: 4,000 for 3,721.

    It is for text that screen readers announce, which must not change every second.
    """
    return f"{float(f'{number:.1g}'):,.0f}"


def format_rate(number: float | None) -> str:
    """Format a rate: 1,234, and with two significant digits below ten, such as 0.25; – for none."""
    if not number:
        return NOTHING
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def format_percent(share: float | None) -> str:
    """Format a share in percent: 42 %, below one percent 0.4 %, and never 100 % for less than everything."""
    if share is None:
        return NOTHING
    percent = share * 100
    if 0 < percent < 1:
        return f"{percent:.1g} %"
    if 99.5 <= percent < 100:
        return "99 %"
    return f"{percent:.0f} %"


def round_shares(shares: Sequence[float]) -> list[int]:
    """Return shares that add up to one as whole percents that add up to 100: the largest remainders are rounded up."""
    percents = [100 * share for share in shares]
    rounded = [int(percent) for percent in percents]
    missing = round(sum(percents)) - sum(rounded)
    for place in sorted(range(len(shares)), key=lambda place: rounded[place] - percents[place])[:missing]:
        rounded[place] += 1
    return rounded


def format_duration(seconds: float | None) -> str:
    """Format a duration: 8 s, 3 min 20 s, 4 h 05 min, 3 d 2 h."""
    if seconds is None:
        return NOTHING
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole} s" if whole >= 1 or seconds <= 0 else f"{seconds:.1g} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE:02} s"
    if whole < DAY:
        return f"{whole // HOUR} h {whole % HOUR // MINUTE:02} min"
    return f"{whole // DAY} d {whole % DAY // HOUR} h"


def format_moment(moment: datetime | None) -> str:
    """Format a moment, such as 2026-11-23 07:15:02 UTC."""
    return NOTHING if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def format_age(moment: datetime | None, now: datetime | None = None) -> str:
    """Format the age of a moment in its largest unit: 12 s ago, 3 min ago, 2 h ago, 5 d ago."""
    if moment is None:
        return NOTHING
    seconds = max(((now or datetime.now(UTC)) - moment).total_seconds(), 0)
    for unit, length in (("d", DAY), ("h", HOUR), ("min", MINUTE)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def mark_code(sentence: str) -> Markup:
    """Return a sentence as HTML, with the text between backticks marked as code."""
    parts = [escape(part) for part in sentence.split("`")]
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in enumerate(parts)
    )


def shorten(text: str) -> str:
    """Return the text, shortened to MOST_SHOWN_CHARS with an ellipsis."""
    return text if len(text) <= MOST_SHOWN_CHARS else f"{text[: MOST_SHOWN_CHARS - 1]}…"
