"""Tables in the docs that are made from tables in the code: `python -m tests.architecture.doc_tables` writes them anew.

In a page such a table stands between <!-- name --> and <!-- end -->.
"""

import re
from collections.abc import Callable, Iterable
from typing import Final

from tests.architecture.sources import ROOT
from vectormill.domain.encoding import RequestedOptions, list_options


def make_options() -> str:
    return table(
        ("option", "default", "meaning"),
        (
            (f"`{option.name}`", option.help.default, option.help.description)
            for option in list_options(RequestedOptions)
        ),
    )


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


DOC_TABLES: Final[tuple[tuple[str, str, Callable[[], str]], ...]] = (
    ("docs/CONFIGURATION.md", "options", make_options),
)


def find_block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=^<!-- {name} -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)


def main() -> None:
    for page, name, make in DOC_TABLES:
        text = (ROOT / page).read_text(encoding="utf-8")
        (former,) = find_block(name).findall(text)
        (ROOT / page).write_text(text.replace(former, make()), encoding="utf-8")


if __name__ == "__main__":
    main()
