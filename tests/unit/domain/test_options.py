"""An option of a job or of its encoding is declared once; a new one is there wherever options are taken."""

import hashlib
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, get_type_hints

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from api.serving import describe_query
from vectormill.cli.command import command
from vectormill.client.requests import nest
from vectormill.client.sync.sources import RunCalls
from vectormill.db.parameters import to_jsonb
from vectormill.domain.encoding import (
    EncodingOptions,
    EncodingSpec,
    OptionArguments,
    RequestedArguments,
    RequestedOptions,
)
from vectormill.domain.options import Help, find_given, list_options, read_options
from vectormill.jobs.job import JobArguments, JobOptions, NewJob, RequestedJob
from vectormill.operation import struct_of
from vectormill.runs.operations import RunArguments, RunOptionsBody
from vectormill.runs.run import ReindexOptions
from vectormill.webhooks.operations import WebhookRequest


@dataclass(frozen=True, slots=True)
class MoreOptions(EncodingOptions):
    """With an option that no release has."""

    rounding: Annotated[str | None, Help("How numbers are cut.", choices=("up", "down"))] = None
    rounds: Annotated[int | None, Help("How often.", metavar="N", least=1)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreRequested(RequestedJob):
    """With options that no release has."""

    urgency: Annotated[int, Help("How loud.", least=1, most=3, example="2")] = 1
    is_quiet: Annotated[bool, Help("Tell nobody.")] = False


@dataclass(frozen=True, slots=True)
class MoreNewJob(NewJob):
    """A job with an option that no release has, and with one that repeats need not share."""

    urgency: Annotated[int, Help("How loud.", least=1, most=3)] = 1
    owner: Annotated[str | None, Help("Who asks.", is_compared=False)] = None


SPEC = EncodingSpec("model", "r1", "mean", True, 384, "", 256)


def test_the_arguments_that_type_checkers_see_are_the_options() -> None:
    assert get_type_hints(OptionArguments) == get_type_hints(EncodingOptions)
    assert get_type_hints(RequestedArguments) == get_type_hints(RequestedOptions)
    declared = {option.name: option.kind | None for option in list_options(RequestedJob)}
    assert get_type_hints(JobArguments) == get_type_hints(RequestedArguments) | declared


def test_a_client_starts_a_run_with_whatever_the_api_takes_for_one() -> None:
    taken = get_type_hints(RunArguments)
    assert set(taken) == set(RunOptionsBody.__struct_fields__) - {"sample"}  # of a check
    declared = {option.name: option.kind | None for option in list_options(ReindexOptions)}
    assert taken == get_type_hints(OptionArguments) | declared | {"model": str | None}


def test_a_run_keeps_what_was_said_of_it_and_its_priority() -> None:
    said = b'{"least_recall": 0.0, "full": true, "confirm": false, "dimensions": 64, "model": "mini"}'
    body = msgspec.json.decode(said, type=RunOptionsBody)
    assert body.to_options() == {"priority": 5, "least_recall": 0.0, "full": True}
    assert body.of_spec() == {"model": "mini", "dimensions": 64}
    for wrong in (b'{"least_recall": 1.1}', b'{"canary_sample": 10001}', b'{"priority": 10}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(wrong, type=RunOptionsBody)


def test_a_client_sends_what_was_said_of_a_run_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(RunCalls, "ask", lambda *_, body, **__: sent.append(body))
    with RunCalls("http://127.0.0.1:9") as client:
        client.reindex("docs")
        client.reindex(
            "docs", model="mini", max_change_share=1.0, least_recall=0.0, dimensions=64, normalize=False
        )
    said = {
        "model": "mini",
        "max_change_share": 1.0,
        "least_recall": 0.0,
        "dimensions": 64,
        "normalize": False,
    }
    assert sent == [{"kind": "reindex", "options": {}}, {"kind": "reindex", "options": said}]


def test_every_option_decides_a_field_of_the_spec() -> None:
    assert {option.name for option in list_options(EncodingOptions)} <= {
        field.name for field in fields(EncodingSpec)
    }


def test_a_new_option_is_read_from_requests() -> None:
    kind = struct_of(MoreOptions)
    read = msgspec.json.decode(b'{"rounding": "up", "normalize": true}', type=kind)
    assert (read.rounding, read.rounds, read.normalize) == ("up", None, True)
    with pytest.raises(msgspec.ValidationError, match=r"\$\.rounding"):
        msgspec.json.decode(b'{"rounding": "sideways"}', type=kind)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"roundings": "up"}', type=kind)


def test_a_new_option_is_described_as_a_query_parameter() -> None:
    described = {each["name"]: each for each in describe_query(struct_of(MoreOptions))}
    assert described["rounding"]["schema"] == {"enum": ["down", "up"]}
    assert described["rounds"]["schema"] == {"type": "integer", "minimum": 1}
    assert described["rounds"]["description"] == "How often."


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], MoreOptions()),
        (["--rounding", "down", "--rounds", "3"], MoreOptions(rounding="down", rounds=3)),
        (["--no-normalize", "--max-tokens", "64"], MoreOptions(normalize=False, max_tokens=64)),
    ],
)
def test_a_new_option_is_a_flag_of_commands(arguments: list[str], expected: MoreOptions) -> None:
    taken: list[dict[str, Any]] = []
    app = typer.Typer()

    @command(app)
    def encode(file: str, *, options: MoreOptions, strict: bool = False) -> None:
        taken.append({"file": file, "strict": strict, **asdict(options)})

    ended = CliRunner().invoke(app, ["texts.jsonl", "--strict", *arguments])
    assert ended.exit_code == 0, ended.output
    assert taken == [{"file": "texts.jsonl", "strict": True, **asdict(expected)}]
    assert "How often." in CliRunner().invoke(app, ["--help"]).output
    assert CliRunner().invoke(app, ["texts.jsonl", "--rounding", "sideways"]).exit_code == 2


def test_a_new_option_of_a_job_is_read_from_bodies_and_described() -> None:
    kind = struct_of(MoreRequested, struct_of(EncodingOptions))
    read = msgspec.json.decode(b'{"urgency": 3, "normalize": true}', type=kind)
    assert MoreRequested(**read_options(MoreRequested, read)) == MoreRequested(urgency=3)
    for value, bound in ((0, ">= 1"), (4, "<= 3")):
        with pytest.raises(msgspec.ValidationError, match=f"`int` {bound} .*urgency"):
            msgspec.json.decode(b'{"urgency": %d}' % value, type=kind)
    described = {each["name"]: each for each in describe_query(kind)}
    assert described["urgency"] == {
        "name": "urgency",
        "in": "query",
        "required": False,
        "schema": {"type": "integer", "minimum": 1, "maximum": 3, "default": 1, "examples": ["2"]},
        "description": "How loud.",
    }
    assert described["is_quiet"]["schema"] == {"type": "boolean", "default": False}


def test_a_new_option_of_a_job_is_a_flag_with_its_default() -> None:
    taken: list[MoreRequested] = []
    app = typer.Typer()

    @command(app)
    def submit(*, job: MoreRequested) -> None:
        """Submit.

        Args:
            is_quiet: Whisper.
        """
        taken.append(job)

    for arguments in ([], ["--urgency", "2", "--is-quiet", "--to", "s3://bucket/out"]):
        assert CliRunner().invoke(app, arguments).exit_code == 0
    assert list(map(find_given, taken)) == [{}, {"urgency": 2, "is_quiet": True, "to": "s3://bucket/out"}]
    help = CliRunner().invoke(app, ["--help"]).output
    assert "Whisper." in help
    assert "[default: 1]" in help
    assert "--no-is-quiet" not in help
    assert CliRunner().invoke(app, ["--urgency", "4"]).exit_code == 2


def test_a_client_sends_the_options_of_a_job_beside_those_of_its_encoding() -> None:
    said = {"priority": 0, "to": None, "dimensions": 64, "truncate": False, "wait_for_worker": True}
    assert nest(said, "options") == {
        "priority": 0,
        "wait_for_worker": True,
        "options": {"dimensions": 64, "truncate": False},
    }


# As the release before options were declared hashed these requests. Their keys must stay valid.
KEPT_HASHES = [
    (NewJob(SPEC), "1beed30ce4d4c3b064e0931dbd09737e"),
    (NewJob(SPEC, wait_for_worker=True), "1beed30ce4d4c3b064e0931dbd09737e"),
    (NewJob(SPEC, collection="docs", priority=2, metadata={"a": 1}), "c1f91fe4ce29d9906bbe86816a50d7fa"),
    (NewJob(SPEC, to="s3://bucket/out"), "df7f652da6f62df15047e719f16694f1"),
]


@pytest.mark.parametrize(("job", "kept"), KEPT_HASHES)
def test_a_key_of_a_request_from_before_an_option_existed_stays_valid(job: NewJob, kept: str) -> None:
    def hash_content(job: NewJob) -> str:
        return hashlib.blake2b(to_jsonb(job.content()).encode(), digest_size=16).hexdigest()

    options = read_options(JobOptions, job)
    upgraded = MoreNewJob(job.spec, metadata=job.metadata, **options)
    assert hash_content(job) == hash_content(upgraded) == kept
    assert hash_content(replace(upgraded, owner="me")) == kept
    assert hash_content(replace(upgraded, urgency=2)) != kept


def test_bodies_that_repeated_requests_are_compared_by_leave_out_defaults() -> None:
    assert msgspec.json.encode(RunOptionsBody()) == b"{}"
    url = "https://example.com/hook"
    assert msgspec.json.decode(msgspec.json.encode(WebhookRequest(url=url))) == {"url": url}
