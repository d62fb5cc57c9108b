"""JSON values on their way to a jsonb parameter."""

import json
from typing import Any


def to_jsonb(value: Any) -> str:
    """JSON text for a parameter that the statement casts to jsonb."""
    return json.dumps(value, separators=(",", ":"))
