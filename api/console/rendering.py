"""Rendering: templates that escape everything and fail on a missing value, with the console's words for numbers."""

from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from api.console import words
from vectormill.runs.run import STEERABLE_RUN_STATES

TEMPLATES: Final = Path(__file__).parent / "templates"

FILTERS: Final = {
    "count": words.tell_count,
    "about": words.tell_about,
    "bytes": words.tell_bytes,
    "rate": words.tell_rate,
    "share": words.tell_share,
    "duration": words.tell_duration,
    "moment": words.tell_moment,
    "ago": words.tell_ago,
    "state": words.tell_state,
    "sentence": words.tell_sentence,
    "query": words.tell_query,
    "json": words.tell_json,
}


def make_templates(**given: Any) -> Environment:
    """`given` is there in every template."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(FILTERS)
    environment.globals.update(given, steerable_run_states=STEERABLE_RUN_STATES)
    return environment
