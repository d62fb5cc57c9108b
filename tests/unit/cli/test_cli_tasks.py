"""What is wrong with a call of `vectormill extract` is told before anything is started."""

from pathlib import Path

import pytest

from tests.unit.cli.test_cli_encode import run

SCHEMA = '{"person": null}'


@pytest.mark.parametrize(
    ("schema", "more", "said"),
    [
        (SCHEMA, ["--format", "parquet", "--show", "1"], "--show reads"),
        ('{"a": null, "a": null}', [], "schema.a: is there twice"),
        ("[" * 100_000, [], "at most 8 levels"),
    ],
)
def test_a_call_that_cannot_be_carried_out_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schema: str, more: list[str], said: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"key": "a", "text": "b"}\n')
    (tmp_path / "schema.json").write_text(schema)
    files = [str(tmp_path / "in.jsonl"), "--schema", str(tmp_path / "schema.json")]
    out = tmp_path / "OUT.JSONL"
    assert run("extract", *files, "-o", str(out), "--api-url", "http://127.0.0.1:9", *more) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()
