"""`gpu`: its plan and what it chooses, on made measurements."""

import json
from dataclasses import asdict

import pytest

from benchmarks.cases.gpu.choosing import (
    HARMS,
    HELPS,
    NEUTRAL,
    Pair,
    Shape,
    Timed,
    Together,
    choose_defaults,
    choose_together,
    order_candidates,
)
from benchmarks.cases.gpu.plan import (
    CARD,
    LONGEST_STEP_SECONDS,
    QUICK,
    RANKS,
    SLOW_TO_LOAD,
    TOGETHER,
    TOTAL_SECONDS,
    count_seconds,
    make_plan,
)
from worker.encoder.switches import SWITCHES, Switch

PLAIN = Switch("plain", "An ordinary one.")
LARGE = Switch("large", "For large models.", pays_from_hidden_size=4096)
SHARED = Switch("shared", "Of ranks.", is_of_ranks=True)


def make_pair(added: str, *ratios: tuple[float, ...], base: tuple[str, ...] = ()) -> Pair:
    """Ratios of one length each, repetition by repetition."""
    by_length = {
        length: Timed(1000, 1e9, tuple(each), (1.0,) * len(each))
        for length, each in zip((16, 100, 256), ratios, strict=False)
    }
    return Pair(base, added, by_length, 1 << 20, 1 << 20, "bf16", "packed")


@pytest.mark.parametrize(
    ("ratios", "verdict", "reason"),
    [
        ([(1.02, 1.03, 1.04)], HELPS, "2 % in the worst repetition"),
        ([(1.005, 1.03, 1.2)], NEUTRAL, "the spread reaches below 1 %, however good the best is"),
        ([(1.0, 1.0, 1.0)], NEUTRAL, "nothing"),
        ([(0.97, 0.98, 0.985)], HARMS, "slower in the best repetition"),
        ([(0.9, 0.98, 1.0)], NEUTRAL, "slower, and not beyond the spread"),
        ([(1.0, 1.0, 1.0), (1.02, 1.02, 1.02)], HELPS, "one length is enough"),
        ([(1.5, 1.5, 1.5), (0.98, 0.98, 0.98)], HARMS, "what is slower at one length is for no card"),
    ],
)
def test_a_switch_is_judged_by_its_worst_repetition(
    ratios: list[tuple[float, ...]], verdict: str, reason: str
) -> None:
    assert make_pair("any", *ratios).verdict == verdict, reason


def test_a_ratio_compares_passes_that_were_made_side_by_side() -> None:
    """A card that slows down slows both: the ratio of medians would be another."""
    timed = Timed(10, 1.0, (1.0, 2.0, 4.0), (0.5, 1.0, 2.0))
    assert (timed.ratio.low, timed.ratio.median, timed.ratio.high) == (2.0, 2.0, 2.0)


def test_candidates_are_those_that_help_alone_and_the_best_comes_first() -> None:
    pairs = [
        make_pair("little", (1.02, 1.02)),
        make_pair("nothing", (1.0, 1.0)),
        make_pair("much", (1.5, 1.5), (1.0, 1.0)),
        make_pair("harm", (1.9, 1.9), (0.5, 0.5)),
    ]
    assert order_candidates(pairs) == ("much", "little")


def test_what_gives_other_vectors_is_measured_and_left_to_who_asks_for_it() -> None:
    fast = make_pair("eighth", (2.0, 2.0))
    assert order_candidates([fast, make_pair("exact", (1.1, 1.1))], by_name={"eighth"}) == ("exact",)
    found = Shape({"eighth": fast}, Together(()))
    chosen, reasons = choose_defaults({"s": found}, ("eighth",), by_name={"eighth"})
    assert chosen == ()
    assert reasons == ["eighth is off unless it is asked for by name: it gives other vectors."]
    assert SWITCHES["fp8"].changes_vectors, "8 bits round more than the 16 that a vector keeps to"


def test_what_helps_alone_is_kept_only_where_it_helps_beside_those_before_it() -> None:
    ratios = {"b": (1.005, 1.005), "c": (1.2, 1.2), "d": (0.9, 0.9)}
    asked: list[tuple[tuple[str, ...], str]] = []
    told: list[Together] = []

    def measure(base: tuple[str, ...], name: str) -> Pair:
        asked.append((base, name))
        return make_pair(name, ratios[name], base=base)

    found = choose_together(("a", "b", "c", "d"), measure, told.append)
    assert found.kept == ("a", "c")
    assert found.untried == ()
    assert asked == [(("a",), "b"), (("a",), "c"), (("a", "c"), "d")]
    assert [(each.kept, each.untried) for each in told] == [
        (("a",), ("c", "d")),
        (("a", "c"), ("d",)),
        (("a", "c"), ()),
    ], "after each pair, what is known is what counts if the step is ended now"


def test_what_there_is_no_time_for_is_said_and_not_kept() -> None:
    answers = iter([make_pair("b", (1.2, 1.2), base=("a",)), None])
    found = choose_together(("a", "b", "c", "d"), lambda base, name: next(answers), lambda _: None)
    assert found.kept == ("a", "b")
    assert found.untried == ("c", "d")


@pytest.mark.parametrize("candidates", [(), ("only",)])
def test_nothing_is_measured_where_there_is_nothing_to_combine(candidates: tuple[str, ...]) -> None:
    def measure(base: tuple[str, ...], name: str) -> Pair:
        raise AssertionError("no pair is needed")

    assert choose_together(candidates, measure, lambda _: None) == Together(candidates)


GOOD, FLAT, BAD = ((1.1, 1.1),), ((1.0, 1.0),), ((0.9, 0.9),)


@pytest.mark.parametrize(
    ("shapes", "is_chosen", "reason"),
    [
        ({"s": Shape({"x": make_pair("x", *GOOD)}, Together(("x",)))}, True, ""),
        (
            {
                "s": Shape({"x": make_pair("x", *GOOD)}, Together(("x",))),
                "t": Shape({"x": make_pair("x", *FLAT)}, Together(())),
            },
            True,
            "",
        ),
        (
            {
                "s": Shape({"x": make_pair("x", *GOOD)}, Together(("x",))),
                "t": Shape({"x": make_pair("x", *BAD)}, Together(())),
            },
            False,
            "x is off: t: it is slower (alone).",
        ),
        (
            {
                "s": Shape({"x": make_pair("x", *GOOD)}, Together(("x",))),
                "t": Shape({"x": None}, Together(())),
            },
            False,
            "x is off: t: it was not measured to the end (it failed).",
        ),
        (
            {"s": Shape({"x": make_pair("x", *GOOD)}, Together(("x",))), "t": Shape({}, Together(()))},
            True,
            "",  # a model that it is not meant for says nothing of it
        ),
        (
            {"s": Shape({"x": make_pair("x", *GOOD)}, None)},
            False,
            "x is off: s: it was not measured to the end (the best ones together were not measured).",
        ),
        (
            {"s": Shape({"x": make_pair("x", *GOOD)}, Together(("a",), (), ("x",)))},
            False,
            "x is off: s: it was not measured to the end (no time was left to try it with the others).",
        ),
        (
            {
                "s": Shape(
                    {"x": make_pair("x", *GOOD)},
                    Together(("a",), (make_pair("x", *BAD, base=("a",)),)),
                )
            },
            False,
            "x is off: s: it is slower (beside a).",
        ),
        (
            {
                "s": Shape(
                    {"x": make_pair("x", *GOOD)},
                    Together(("a",), (make_pair("x", *FLAT, base=("a",)),)),
                )
            },
            False,
            "x is off: it brings less than 1% beyond the spread.",
        ),
        ({"s": Shape({}, Together(()))}, False, "x is off: it cannot be tried here."),
    ],
)
def test_a_card_gets_what_is_kept_for_a_shape_and_harms_none(
    shapes: dict[str, Shape], is_chosen: bool, reason: str
) -> None:
    chosen, reasons = choose_defaults(shapes, ("x",))
    assert chosen == (("x",) if is_chosen else ())
    assert reasons == ([reason] if reason else [])


def test_a_pair_is_read_again_as_it_was_written() -> None:
    together = Together(("a", "b"), (make_pair("b", (1.1, 1.2), (1.3, 1.4), base=("a",)),), ("c",))
    assert Together.from_json(json.loads(json.dumps(asdict(together)))) == together


# -- the plan ------------------------------------------------------------------------------------------------


def test_all_steps_together_end_within_forty_minutes_and_each_within_ten() -> None:
    """With every switch that there is, on a machine with two cards, where each step takes all of its time."""
    plan = make_plan(CARD, tuple(SWITCHES.values()), find_small, num_devices=2)
    assert count_seconds(plan) <= TOTAL_SECONDS
    assert max(step.limit_seconds for step in plan) < LONGEST_STEP_SECONDS
    assert len({step.name for step in plan}) == len(plan)


def test_switches_that_get_more_time_are_in_the_table() -> None:
    assert not SLOW_TO_LOAD - set(SWITCHES)


def find_small(switch: Switch, shape: str) -> str:
    """As on a card that has everything: only what is meant for large models is left out of small ones."""
    return "it is too small" if switch.pays_from_hidden_size and not shape.startswith("qwen") else ""


def test_the_best_together_are_measured_behind_all_that_are_alone() -> None:
    names = [step.name for step in make_plan(QUICK, (PLAIN, LARGE), lambda *_: "", 1)]
    assert names.index("switch tiny plain") < names.index("switch tiny large") < names.index("together tiny")
    assert names.index("together tiny") < names.index("budgets tiny")


@pytest.mark.parametrize(
    ("num_devices", "reason"), [(1, "a model is shared by two devices, and there is 1"), (2, "")]
)
def test_switches_of_ranks_need_two_devices_and_say_so(num_devices: int, reason: str) -> None:
    plan = make_plan(CARD, (PLAIN, SHARED), lambda *_: "", num_devices)
    ranks = [step for step in plan if step.kind == RANKS]
    assert [(step.strategy, step.switch) for step in ranks] == [("pipeline", "shared"), ("tensor", "shared")]
    assert {step.obstacle for step in ranks} == {reason}
    assert not any("shared" in step.name for step in plan if step.kind not in (RANKS, TOGETHER))


def test_what_is_left_out_takes_no_time() -> None:
    with_all = make_plan(CARD, (PLAIN, LARGE), lambda *_: "", 1)
    without = make_plan(CARD, (PLAIN, LARGE), lambda switch, _: "no" if switch is LARGE else "", 1)
    limits = sum(sized.switch_seconds for sized in CARD.sized)
    assert count_seconds(with_all) - count_seconds(without) == limits
