"""A holder of a key of scope `read` sees descriptions, errors and events: none of them opens anything."""

import io
import json
import logging
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine

from tests.api_server import api_client, encoding_meanwhile
from tests.database import ask
from tests.http_server import QuietHandler, serving_http
from tests.indexers import KeptSource, await_run, indexing, make_collection, start_run
from tests.webhooks import events_of, make_webhook
from vectormill.domain import errors
from vectormill.domain.credentials import hide_in_options
from vectormill.domain.errors import InvalidOption, VectormillError
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key
from vectormill.objects.store import normalize
from vectormill.processes.logs import JsonFormatter, LineFormatter
from vectormill.rows.items import Complaints
from vectormill.sources.reader import SourceAssembler
from vectormill.sources.source import FILES, Source
from vectormill.sources.sources import save_source

# Secrets have the characters that RFC 3986 allows in the user and the query of a URL. They are so long that no
# sentence has one by chance.
SECRETS = st.text(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~!$&'()*+,;=:%", min_size=12
).map(lambda drawn: f"Q7{drawn}7Q")
ADDRESSES = (
    "https://{}@files.example/rows.jsonl", "https://me:{}@files.example/rows.jsonl", "HTTPS://{}@[::1]:8000/a/*.csv",
    "https://files.example/rows.jsonl?X-Amz-Signature={}&X-Amz-Expires=60", "http://files.example/rows.csv?{}",
    "https://files.example/rows.csv?se=2027&sig={}", "s3://bucket/rows.csv?X-Amz-Signature={}", "s3://{}@bucket/x.csv",
    "sftp://me:{}@files.example/x.csv", "gs://bucket/x.csv?token={}", "postgresql+psycopg://me:{}@host/db?sslmode=no",
)  # fmt: skip
SENTENCES = (
    "No file matches {0} on the machine.", "{0} cannot be read: 404, message='Not Found', url='{0}'.",
    "Sources cannot be read from {0!r}; try (URL('{0}')), or \"{0}\".", "{0}", "{0}, row 3: {0}, {0}: {0}.",
)  # fmt: skip
# Errors whose messages show keys, and name no address that is read.
OF_KEYS = {"DuplicateKey"}


def list_errors(kind: type[VectormillError] = VectormillError) -> Iterator[type[VectormillError]]:
    for each in kind.__subclasses__():
        if each.__module__ == errors.__name__:
            yield each
        yield from list_errors(each)


@given(SECRETS, st.sampled_from(ADDRESSES), st.sampled_from(SENTENCES), st.sampled_from(list(list_errors())))
def test_no_text_shows_what_is_secret_in_an_address(
    secret: str, address: str, sentence: str, kind: type[VectormillError]
) -> None:
    url = address.format(secret)
    told = sentence.format(url)
    assert (secret in str(kind(told))) == (kind.__name__ in OF_KEYS)
    options = {
        "files": [url, "part-?.csv"],
        "query": f"SELECT * FROM '{url}' AS t",
        "format": None,
        "pages": True,
    }
    shown = hide_in_options(options)
    assert secret not in str(shown)
    assert (shown["files"][1], shown["format"], shown["pages"]) == ("part-?.csv", None, True)
    complaints = Complaints()
    SourceAssembler(url, 1024, complaints).assemble(["", "a"], ["x", None])
    assert len(complaints.examples) == 2
    assert secret not in str(complaints.to_json())
    if urlsplit(url).scheme in ("s3", "gs"):  # they would be the names of items
        with pytest.raises(InvalidOption) as refused:
            normalize(url)
        assert secret not in str(refused.value)
    written = io.StringIO()
    for formatter in (LineFormatter("%(message)s"), JsonFormatter("api")):
        handler = logging.StreamHandler(written)
        handler.setFormatter(formatter)
        try:
            raise OSError(told)
        except OSError as error:
            handler.handle(logging.LogRecord("a", 30, "a.py", 1, "Lost %s", (told,), (OSError, error, None)))
    assert "OSError" in written.getvalue()
    assert secret not in written.getvalue()
    assert secret not in json.dumps(written.getvalue())


def test_patterns_paths_and_keys_are_shown_as_they_are() -> None:
    for plain in (
        "s3://bucket/part-?.csv", "s3://bucket/year=202?/*.csv", "abfs://container@account/x.csv", "a?b=c", "x@y: z",
        "Is it http://127.0.0.1:8000? Yes.", "https://files.example/a/b.csv", "file:///srv/a@b/x.csv",
    ):  # fmt: skip
        assert str(errors.SourceFailed(plain)) == plain
        if plain.startswith(("s3", "file")):
            assert normalize(plain) == plain


class Presigned(QuietHandler):
    """A store that knows its token, and has one file that is whole and one that is not."""

    def answer(self) -> None:
        if "whole" in self.path:
            return self.reply(200, b'{"key": "", "text": "x"}\n{"key": "a", "text": ""}\n')
        if "torn" in self.path:
            return self.reply(200, b'{"key": "a", "te')
        return self.reply(403)


@pytest.mark.parametrize("name", ["whole", "torn", "forbidden"])
def test_a_key_that_reads_is_shown_nothing_that_opens_the_files_of_a_source(
    engine: Engine, name: str
) -> None:
    make_collection(engine)
    webhook, _ = make_webhook(engine)
    secret = make_secret()
    ask(engine, create_key, "reader", secret, "read", None)
    with serving_http(Presigned) as url:
        files = [f"{url.replace('//', '//t0ken@')}/{name}.jsonl?X-Amz-Signature=hunter2&X-Amz-Expires=60"]
        ask(engine, save_source, "docs", Source(FILES, {"files": files, "format": "jsonl"}))
        source = KeptSource()
        with encoding_meanwhile(engine), indexing(engine, source, source.open):
            run = await_run(engine, start_run(engine))
    assert (run.error is None) == (name == "whole")
    with api_client(engine) as client:
        client.headers["Authorization"] = f"Bearer {secret}"
        pages = ["/v1/collections/docs", "/v1/collections/docs/source", "/v1/runs", f"/v1/runs/{run.id}"]
        answers = [client.get(page) for page in pages]
        (csrf,) = re.findall(r'name="csrf" value="([0-9a-f]{64})"', client.get("/console/login").text)
        client.post("/console/login", data={"csrf": csrf, "key": secret})
        answers += [client.get(page) for page in ("/console/collections/docs", "/console/collections")]
    shown = [answer.text for answer in answers] + [json.dumps(events_of(engine, webhook))]
    assert all(answer.status_code == 200 for answer in answers), [answer.status_code for answer in answers]
    assert ".jsonl?" in "".join(shown)
    for text in shown:
        assert "hunter2" not in text
        assert "t0ken" not in text
