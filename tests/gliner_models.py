"""Two tiny GLiNERs, and what the package gliner makes of some texts with them (tests/data/gliner/make.py)."""

import json
from pathlib import Path
from typing import Any, Final

GOLDEN: Final = Path(__file__).parent / "data" / "gliner"
KNOWN: Final[dict[str, Any]] = json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))
