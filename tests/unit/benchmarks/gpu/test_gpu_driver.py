"""`gpu`: how its steps are run, recorded and resumed, with steps that are made up and processes of this test."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases.gpu.driver import Ending, describe_plan, drive
from benchmarks.cases.gpu.plan import Step
from benchmarks.cases.gpu.process import StepProcess
from benchmarks.cases.gpu.state import (
    DONE,
    FAILED,
    RECORDS,
    TIMED_OUT,
    Identity,
    Record,
    State,
    digest_code,
)
from benchmarks.order import BenchmarkFailed
from tests.waiting import wait_for
from vectormill.processes.lifetimes import is_alive

H100 = Identity("NVIDIA H100", "sm_90", "2.13.0", "card", "abc", "1234567")
PLAN = (
    Step("first", "switch", 60),
    Step("second", "switch", 60, obstacle="it needs another card"),
    Step("third", "together", 120),
)
SHORT = Step("fourth", "host", 1)


class Runs:
    """Steps that end as they are told to, on a clock of their own."""

    def __init__(self, **endings: Ending) -> None:
        self.endings = endings
        self.ran: list[tuple[str, Mapping[str, Any]]] = []
        self.now = 0.0

    def __call__(self, step: Step, given: Mapping[str, Any]) -> Ending:
        self.ran.append((step.name, given))
        self.now += 30
        return self.endings.get(step.name, Ending(DONE, {"found": step.name}))

    def drive(
        self,
        state: State,
        again: tuple[str, ...] = (),
        total_seconds: float = 1e9,
        plan: tuple[Step, ...] = PLAN,
    ) -> list[str]:
        """What is said; what waits is in `waiting`."""
        said: list[str] = []
        self.waiting = drive(
            plan,
            state,
            self,
            lambda step, state: {"known": bool(state.find("first"))},
            say=said.append,
            clock=lambda: self.now,
            total_seconds=total_seconds,
            again=again,
        )
        return said


def test_each_step_is_run_once_and_a_second_start_says_so(tmp_path: Path) -> None:
    runs = Runs()
    said = runs.drive(State.open(tmp_path, H100))
    assert said == [
        "first, at most 60.0 s",
        "second: left out, it needs another card",
        "third, at most 120 s",
    ]
    assert runs.ran == [("first", {"known": False}), ("third", {"known": True})]
    again = Runs()
    state = State.open(tmp_path, H100)
    assert again.drive(state) == [
        "first: done before, in 30.0 s",
        "second: left out, it needs another card",
        "third: done before, in 30.0 s",
    ]
    assert again.ran == []
    found = state.find("third")
    assert found is not None
    assert found.result == {"found": "third"}


@pytest.mark.parametrize("outcome", [FAILED, TIMED_OUT])
def test_a_step_that_does_not_end_well_keeps_what_it_found_and_holds_up_nobody(
    outcome: str, tmp_path: Path
) -> None:
    runs = Runs(first=Ending(outcome, {"half": 1}, "Traceback\n  line\nMemoryError: no room"))
    runs.drive(State.open(tmp_path, H100))
    assert [name for name, _ in runs.ran] == ["first", "third"]
    second = Runs()
    state = State.open(tmp_path, H100)
    said = second.drive(state)
    assert second.ran == [], "a step that hangs shall not take its time at each start"
    assert said[0] == f"first: {outcome} before: MemoryError: no room (--again 'first' repeats it)"
    record = state.find("first")
    assert record is not None
    assert record.result == {"half": 1}
    assert second.drive(state, again=("first",))[0] == "first, at most 60.0 s"
    assert [name for name, _ in second.ran] == ["first"]
    repeated = State.open(tmp_path, H100).find("first")
    assert repeated is not None
    assert repeated.outcome == DONE, "the newest record is the one that counts"


def test_no_step_is_started_that_might_not_end_in_time(tmp_path: Path) -> None:
    runs = Runs()
    said = runs.drive(State.open(tmp_path, H100), total_seconds=100)
    assert said[-1] == "third: left for the next start"
    assert [step.name for step in runs.waiting] == ["third"]
    later = Runs()
    later.drive(State.open(tmp_path, H100), total_seconds=120)
    assert [name for name, _ in later.ran] == ["third"]
    assert later.waiting == ()


def test_nothing_goes_before_a_step_that_waits(tmp_path: Path) -> None:
    """It would go by what that step has not found yet."""
    runs = Runs()
    runs.drive(State.open(tmp_path, H100), total_seconds=100, plan=(*PLAN, SHORT))
    assert [name for name, _ in runs.ran] == ["first"]
    assert [step.name for step in runs.waiting] == ["third", "fourth"]


def test_a_step_that_there_is_not_is_refused_before_anything_runs(tmp_path: Path) -> None:
    runs = Runs()
    with pytest.raises(BenchmarkFailed, match="no step 'frist'; did you mean 'first'"):
        runs.drive(State.open(tmp_path, H100), again=("frist",))
    assert runs.ran == []


def test_a_plan_says_what_it_may_take_and_what_is_left_of_that(tmp_path: Path) -> None:
    state = State.open(tmp_path, H100)
    state.add(Record("first", DONE, 1.0, "now"))
    assert describe_plan(PLAN, state) == (
        "2 steps, 3.0 min if each takes its limit; 1 of them to do, 2.0 min"
    )


# -- state ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        (Identity("NVIDIA H200", "sm_90", "2.13.0", "card", "abc", "1234567"), "NVIDIA H100"),
        (Identity("NVIDIA H100", "sm_90", "2.14.0", "card", "abc", "1234567"), "torch 2.13.0"),
        (Identity("NVIDIA H100", "sm_90", "2.13.0", "card", "def", "89abcde"), "code abc"),
        (Identity("NVIDIA H100", "sm_90", "2.13.0", "quick", "abc", "1234567"), "Name another directory"),
    ],
)
def test_records_of_another_card_torch_or_code_are_not_gone_on_with(
    identity: Identity, words: str, tmp_path: Path
) -> None:
    State.open(tmp_path, H100).add(Record("first", DONE, 1.0, "now"))
    with pytest.raises(BenchmarkFailed, match=words) as caught:
        State.open(tmp_path, identity)
    assert "--state" in str(caught.value)


def test_a_commit_that_changes_no_code_of_the_product_changes_nothing(tmp_path: Path) -> None:
    State.open(tmp_path, H100).add(Record("first", DONE, 1.0, "now"))
    other = Identity("NVIDIA H100", "sm_90", "2.13.0", "card", "abc", "fedcba9")
    assert State.open(tmp_path, other).find("first") is not None


def test_a_record_that_was_cut_off_is_as_if_it_had_never_been_written(tmp_path: Path) -> None:
    state = State.open(tmp_path, H100)
    state.add(Record("first", DONE, 1.0, "now"))
    with (tmp_path / RECORDS).open("a", encoding="utf-8") as file:
        file.write('{"step": "third", "outc')
    state = State.open(tmp_path, H100)
    assert state.find("third") is None
    state.add(Record("third", FAILED, 1.0, "now", {}, "a reason"))
    lines = (tmp_path / RECORDS).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line).get("step") for line in lines] == [None, "first", "third"]


def test_records_of_a_form_that_is_not_known_are_refused(tmp_path: Path) -> None:
    (tmp_path / RECORDS).write_text('{"card": "NVIDIA H100", "colour": "green"}\n', encoding="utf-8")
    with pytest.raises(BenchmarkFailed, match="another form"):
        State.open(tmp_path, H100)


def test_the_code_is_told_by_its_files_alone(tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir()
    (tmp_path / "vectormill").mkdir()
    (tmp_path / "worker/engine.py").write_text("one = 1\n")
    before = digest_code(tmp_path)
    (tmp_path / "worker/switch_defaults.json").write_text("{}")
    (tmp_path / "docs.md").write_text("a page")
    assert digest_code(tmp_path) == before, "what --write writes is no other code"
    (tmp_path / "worker/engine.py").write_text("one = 2\n")
    assert digest_code(tmp_path) != before


# -- processes -----------------------------------------------------------------------------------------------

CHILD = """
import json, subprocess, sys, time
order = json.loads(sys.argv[1])
def tell(result):
    with open(order["result"], "w") as file:
        json.dump(result, file)
name = order["step"]["name"]
tell({"given": order["given"], "devices": order["devices"]})
if name == "fails":
    sys.exit("the card is on fire")
if name == "hangs":  # for longer than any test waits: both have to be ended
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(sys.argv[0].replace("gpu_child.py", "pid"), "w") as file:
        file.write(str(sleeper.pid))
    time.sleep(600)
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepProcess:
    (tmp_path / "gpu_child.py").write_text(CHILD)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return StepProcess("quick", ("cpu:0",), tmp_path, tmp_path / "state", module="gpu_child")


def test_a_step_is_a_process_that_is_told_what_was_found_and_says_what_it_finds(steps: StepProcess) -> None:
    ending = steps(Step("works", "switch", 60), {"rates": {"bf16": 1.0}})
    assert ending == Ending(DONE, {"given": {"rates": {"bf16": 1.0}}, "devices": ["cpu:0"]})


def test_a_step_that_fails_leaves_its_last_words_its_findings_and_its_log(
    steps: StepProcess, tmp_path: Path
) -> None:
    ending = steps(Step("fails", "switch", 60), {})
    assert ending.outcome == FAILED
    assert ending.reason.endswith("the card is on fire")
    assert ending.result["devices"] == ["cpu:0"]
    assert "on fire" in (tmp_path / "state/logs/fails.log").read_text()


def test_a_step_that_overruns_is_ended_with_all_that_it_started_and_keeps_what_it_found(
    steps: StepProcess, tmp_path: Path
) -> None:
    """The limit is long enough for a busy machine to start an interpreter twice within it."""
    ending = steps(Step("hangs", "switch", 10), {})
    assert ending.outcome == TIMED_OUT
    assert ending.reason == "it was ended after 10.0 s"
    assert ending.result["devices"] == ["cpu:0"]
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_alive(pid), because="what the step had started has ended")
