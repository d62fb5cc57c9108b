"""Credentials in URLs, which anybody who reads them can use: those of presigned addresses, users and tokens.

Imports only the standard library, because processes without the rest write logs too.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

# Before the @ of abfs:// stands the name of a container.
USER: Final = re.compile(r"(?<=://)(?<!\babfs://)(?<!\babfss://)[^/?#\s]*@", re.IGNORECASE)
# Elsewhere than in HTTP a ? may belong to a pattern, and is then not followed by a name and =.
# Either goes on up to the punctuation of the sentence.
END: Final = r"\S*?(?=[,.;:)\]'\"]*(?:\s|$))"
QUERY: Final = re.compile(rf"(?<=\?)[^\s?'\"]*={END}")
QUERY_OF_HTTP: Final = re.compile(rf"(\bhttps?://[^\s?]{{0,8192}}\?)[^\s'\"]{END}", re.IGNORECASE)


def hide_credentials(text: str) -> str:
    """Return the text without the users and the query strings of its URLs, each replaced by an ellipsis."""
    if "://" not in text:
        return text
    return QUERY.sub("…", QUERY_OF_HTTP.sub(r"\1…", USER.sub("…@", text)))


def hide_in_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a source without the credentials of URLs in texts and lists of texts."""
    return {
        name: [hide_credentials(str(each)) for each in value]
        if isinstance(value, list | tuple)
        else hide_credentials(value)
        if isinstance(value, str)
        else value
        for name, value in options.items()
    }
