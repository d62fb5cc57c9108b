"""An option of encoding is defined once; a new one is there wherever options are taken."""

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, get_type_hints

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from api.serving import describe_query
from vectormill.cli.command import command
from vectormill.client.sync.sources import RunCalls
from vectormill.domain.encoding import (
    EncodingOptions,
    EncodingSpec,
    Help,
    OptionArguments,
    RequestedArguments,
    RequestedOptions,
    list_options,
)
from vectormill.operation import struct_of
from vectormill.runs.operations import RunArguments, RunOptionsBody


@dataclass(frozen=True, slots=True)
class MoreOptions(EncodingOptions):
    """With an option that no release has."""

    rounding: Annotated[str | None, Help("How numbers are cut.", choices=("up", "down"))] = None
    rounds: Annotated[int | None, Help("How often.", metavar="N", least=1)] = None


def test_the_arguments_that_type_checkers_see_are_the_options() -> None:
    assert get_type_hints(OptionArguments) == get_type_hints(EncodingOptions)
    assert get_type_hints(RequestedArguments) == get_type_hints(RequestedOptions)


def test_a_client_starts_a_run_with_whatever_the_api_takes_for_one() -> None:
    taken = set(get_type_hints(RunArguments))
    assert taken == set(RunOptionsBody.__struct_fields__) - {"sample"}  # of a check


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
