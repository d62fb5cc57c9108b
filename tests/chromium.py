"""The Chromium of this machine, for tests of pages and for pictures of them."""

import os
import shutil
from typing import Final

VARIABLE: Final = "CHROMIUM"
NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NO_BROWSER: Final = (
    f"no Chromium is here: looked for {', '.join(NAMES)} in PATH, and {VARIABLE} names none; "
    "on Debian and Ubuntu `apt install chromium` brings one"
)
# No name but this machine's resolves: a page that wanted anything of the internet would lack it.
ARGUMENTS: Final = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
]


def find_chromium() -> str | None:
    """Its path: that of the environment, or the first of PATH."""
    if path := os.environ.get(VARIABLE):
        return path
    return next((path for name in NAMES if (path := shutil.which(name))), None)
