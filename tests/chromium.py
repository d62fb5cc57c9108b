"""Find this machine's Chromium, for tests of pages and for screenshots."""

import os
import shutil
from typing import Final

VARIABLE: Final = "CHROMIUM"
NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NO_BROWSER: Final = (
    f"no Chromium is here: looked for {', '.join(NAMES)} in PATH, and {VARIABLE} names none; "
    "on Debian and Ubuntu `apt install chromium` brings one"
)
# No name but this machine's resolves, so that a page that needs anything from the internet fails.
ARGUMENTS: Final = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
]  # fmt: skip


def find_chromium() -> str | None:
    """Return the path of Chromium from the environment or PATH; None if there is none."""
    if path := os.environ.get(VARIABLE):
        return path
    return next((path for name in NAMES if (path := shutil.which(name))), None)
