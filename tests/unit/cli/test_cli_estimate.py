"""The intervals of `vectormill estimate` hold the rates that were measured."""

import json
from typing import Any

import pytest

from vectormill.cli.app import main

# Committed tokens per second that were measured (docs/SIZING.md): MiniLM, by the description of the machine.
MEASURED = {"2cores,24GiB": 5_422, "1x141GiB@sm_90,16cores,128GiB": 4_800_000}


def estimate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as end:
        main(("estimate", *arguments, "--json"))
    assert end.value.code == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize("devices", MEASURED)
def test_the_interval_holds_what_was_measured(devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = estimate(capsys, "--rows", "1e6", "--tokens", "100", "--devices", devices)
    rate = answer["tokens_per_second"]
    assert rate["least"] <= MEASURED[devices] <= rate["most"]
    assert answer["tokens"]["value"] == 100_000_000
    assert answer["seconds"]["least"] == pytest.approx(100_000_000 / rate["most"], rel=0.01)
    assert answer["seconds"]["most"] == pytest.approx(100_000_000 / rate["least"], rel=0.1)


def test_two_cards_and_a_measured_rate_and_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (
        estimate(capsys, "--rows", "10", "--tokens", "10", "--devices", devices)["tokens_per_second"]
        for devices in ("1x80GiB@sm_90", "2x80GiB@sm_90")
    )
    assert two == pytest.approx({name: 2 * value for name, value in one.items()})
    given = ("--rows", "3.6e6", "--tokens", "1000", "--tokens-per-second", "1e6", "--price", "4")
    answer = estimate(capsys, *given)
    tokens = answer["tokens"]["value"]
    assert tokens == 3_600_000 * 256, "the model reads no more of a text"
    assert answer["price"]["least"] < 4 * tokens / 1e6 / 3600 < answer["price"]["most"]


def test_a_model_without_weights_and_one_whose_vectors_have_no_index(
    capsys: pytest.CaptureFixture[str],
) -> None:
    devices = ("--devices", "1x80GiB@sm_90")
    large = estimate(capsys, "--rows", "1e6", "--tokens", "9", "--model", "docs/plans/mistral-7b", *devices)
    rate = large["tokens_per_second"]
    assert 1_000 < rate["least"] < rate["most"] < 100_000
    assert (large["index_bytes"], "4,000" in large["index_reason"]) == (None, True)


def test_numbers_that_no_job_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for number in ("0", "inf", "nan"):
        with pytest.raises(SystemExit) as end:
            main(("estimate", "--rows", number, "--tokens", "10"))
        assert (end.value.code, "must be from 1 to 1e+15" in capsys.readouterr().err) == (2, True)
