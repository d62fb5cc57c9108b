"""The benchmark `engine`: its texts, its turns and its targets, without a model and without a peer."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks import mixes
from benchmarks.cases.comparing import list_reasons
from benchmarks.cases.engine.engine_targets import TARGETS, find_fastest_peer, judge_engine
from benchmarks.cases.engine.pass_length import plan_copies
from benchmarks.mixes import (
    CHINESE,
    DOCUMENTS,
    NUM_TEXTS,
    OUTLIERS,
    PARAGRAPHS,
    QUERIES,
    SHORT_JOB,
    make_mix,
    plan_sizes,
)
from benchmarks.models.same_limit import copy_with_limit
from benchmarks.order import BenchmarkFailed
from benchmarks.peers.catalogue import PEERS, find_obstacle
from benchmarks.peers.environment import REQUIREMENTS, prepare_environment
from benchmarks.results.comparison import Comparison
from benchmarks.systems.missing import MissingSystem
from benchmarks.systems.protocol import Pass
from benchmarks.systems.system import EncodingProcesses, System
from benchmarks.systems.turns import Record, Turns
from vectormill.domain.errors import ModelError
from vectormill.models.model_card import read_model_card
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.device import CPU, Device

VECTORS = np.array([[1, 0], [0, 1]], dtype=np.float32)
FAR_VECTORS = np.array([[1, 0.2], [0, 1]], dtype=np.float32)


# -- texts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [PARAGRAPHS, QUERIES, DOCUMENTS, OUTLIERS])
def test_a_mix_has_as_many_different_texts_as_were_asked_for_and_always_the_same(name: str) -> None:
    mix = make_mix(name, 40, Path())
    assert len(set(mix.texts)) == len(mix.texts) == 40
    assert make_mix(name, 40, Path()) == mix


def test_the_texts_of_a_mix_are_as_long_as_its_description_says() -> None:
    lengths = {
        name: [len(text.split()) for text in make_mix(name, 50, Path()).texts]
        for name in (PARAGRAPHS, QUERIES, DOCUMENTS, OUTLIERS)
    }
    assert min(lengths[PARAGRAPHS]) >= 30
    assert max(lengths[PARAGRAPHS]) <= 200
    assert min(lengths[QUERIES]) >= 3
    assert max(lengths[QUERIES]) <= 12
    assert min(lengths[DOCUMENTS]) >= 400
    assert max(lengths[DOCUMENTS]) <= 2000
    # One of ten is long, wherever a batch of consecutive texts begins.
    assert [number for number, length in enumerate(lengths[OUTLIERS]) if length >= 400] == [5, 15, 25, 35, 45]


def test_there_are_enough_texts_for_every_mix_by_itself() -> None:
    for name in (PARAGRAPHS, QUERIES, DOCUMENTS, OUTLIERS):
        assert len(make_mix(name, NUM_TEXTS[name], Path()).texts) == NUM_TEXTS[name], name


def test_chinese_texts_are_the_prose_of_docstrings_that_are_mostly_chinese(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(
        'def a():\n    """<p>查询一个或多个实例的详细信息，可以根据实例进行查询。</p>\n\n    :rtype: str\n    """\n'
        'def b():\n    """Only English here, long enough to be a text of its own."""\n'
        'def c():\n    """:param _X: 按照可用区过滤，可用区的名称必须完整。\n    :type X: list of str\n    """\n'
        'def d():\n    """实例。"""\n',
        encoding="utf-8",
    )
    assert make_mix(CHINESE, 10, tmp_path).texts == (
        "查询一个或多个实例的详细信息，可以根据实例进行查询。",
        "按照可用区过滤，可用区的名称必须完整。",
    )


def test_a_mix_without_texts_is_missing_and_not_empty(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="no texts for the mix 'chinese'"):
        make_mix(CHINESE, 10, tmp_path)


@pytest.mark.parametrize(
    ("items", "expected", "reason"),
    [
        (None, {PARAGRAPHS: 1200, QUERIES: 2000}, "the usual sizes"),
        (120, {PARAGRAPHS: 120, QUERIES: 200}, "all in proportion to the paragraphs"),
        (1, {PARAGRAPHS: 10, QUERIES: 10}, "a warm-up needs a tenth of something"),
    ],
)
def test_sizes_of_mixes_keep_their_proportion(
    items: int | None, expected: dict[str, int], reason: str
) -> None:
    assert plan_sizes([PARAGRAPHS, QUERIES], items) == expected, reason


def test_copies_of_texts_are_never_equal() -> None:
    assert mixes.number_copies(["a", "b"], 3) == ["a", "b", "1 a", "1 b", "2 a", "2 b"]


# -- turns ---------------------------------------------------------------------------------------------------


class Toy:
    """A system that counts its passes, and fails in the one that it is told."""

    def __init__(self, name: str, log: list[str], fails_in_pass: int | None = None) -> None:
        self.name = name
        self._log = log
        self._fails_in_pass = fails_in_pass
        self._num_passes = 0

    def __enter__(self) -> "Toy":
        self._log.append(f"{self.name} in")
        return self

    def __exit__(self, *exception: object) -> None:
        self._log.append(f"{self.name} out")

    def warm_up(self, mix: str) -> None:
        self._log.append(f"{self.name} warm")

    def encode(self, mix: str) -> Pass:
        self._num_passes += 1
        if self._num_passes == self._fails_in_pass:
            raise BenchmarkFailed("No room was left.")
        self._log.append(f"{self.name} {mix}")
        return Pass(1.0, 10, 11)

    def vectors(self) -> Any:
        return VECTORS

    def report(self) -> dict[str, Any]:
        return {"precision": {"value": "fp32"}}

    def find_processes(self) -> EncodingProcesses:
        return EncodingProcesses([psutil.Process()], [psutil.Process()])


def test_systems_take_turns_and_all_are_ended() -> None:
    log: list[str] = []
    said: list[str] = []
    with Turns({"a": Toy("a", log), "b": Toy("b", log)}, said.append) as turns:
        records = turns.run("x", 2)
    assert log == ["a in", "b in", "a warm", "b warm", "a x", "b x", "a x", "b x", "b out", "a out"]
    assert len(said) == Turns.count_steps(2, 1, 2)
    assert [len(record.passes) for record in records.values()] == [2, 2]
    assert records["a"].whole_peak_bytes >= records["a"].model_peak_bytes > 0
    assert records["a"].report == {"precision": {"value": "fp32"}}


def test_a_system_that_fails_is_left_out_with_its_reason_and_the_others_go_on() -> None:
    log: list[str] = []
    said: list[str] = []
    systems: dict[str, System] = {
        "missing": MissingSystem("missing", "It is not installed."),
        "weak": Toy("weak", log, 2),
        "b": Toy("b", log),
    }
    with Turns(systems, said.append) as turns:
        first, second = turns.run("x", 3), turns.run("y", 1)
    assert first["missing"].failure == second["missing"].failure == "It is not installed."
    assert first["weak"].failure == second["weak"].failure == "No room was left."
    assert not first["weak"].passes
    assert (len(first["b"].passes), len(second["b"].passes)) == (3, 1)
    assert log[-2:] == ["b out", "weak out"]
    assert len(said) == 3 + 3 * 4 + 3 * 2  # as many as were announced, whoever fails


# -- tables and targets --------------------------------------------------------------------------------------


def make_record(
    name: str, seconds: Sequence[float], vectors: Any = VECTORS, computed: int = 102, peak: int = 100 << 20
) -> Record:
    passes = [Pass(each, 100, computed) for each in seconds]
    return Record(name, passes, model_peak_bytes=peak, whole_peak_bytes=peak, vectors=vectors)


def make_comparison(mix: str, records: dict[str, Record]) -> Comparison:
    return Comparison(
        mix=mix,
        description="texts of a test",
        num_texts=100,
        num_tokens=1000,
        flop=2e9,
        peer="sentence-transformers",
        records=records,
        precisions={"engine": "bf16"},
        limits={"fp32": 1.0, "bf16": 4.0},
    )


RECORDS = {
    "service": make_record("ours, end to end", [1.0, 1.0, 1.0], peak=30 << 20),
    "engine": make_record("our engine alone", [0.5, 0.5, 0.5]),
    "bare-openvino": make_record("openvino, a bare loop", [0.45, 0.45, 0.45], np.zeros((0, 2))),
    "sentence-transformers": make_record("sentence-transformers", [7.0, 6.0, 5.0], computed=150),
    "near": make_record("near", [2.0, 2.0, 2.0]),
    "far": make_record("far", [1.2, 1.2, 1.2], FAR_VECTORS),
    "gone": Record("gone", failure="Traceback\n  File x\nImportError: no such module"),
}


def test_a_row_has_speed_padding_share_memory_and_cosines() -> None:
    table = make_comparison(PARAGRAPHS, RECORDS).to_table()
    rows = {row[0]: row[1:] for row in table.rows}
    assert table.header[0] == "paragraphs: 100 texts, 1,000 tokens"
    assert rows["ours, end to end"] == (
        "100", "1,000", "6.00× (5.00× to 7.00×)", "2.0%", "200.0%", "30 MiB", "1.000000", "1.000000",
    )  # fmt: skip
    assert rows["our engine alone"][4] == "100.0%"  # of the limit of its own precision
    assert rows["far"][6] == "0.980581"


def test_a_system_that_was_not_measured_has_a_row_and_a_reason() -> None:
    comparison = make_comparison(PARAGRAPHS, RECORDS)
    row = comparison.to_table().rows[-1]
    assert row[:2] == ("gone", "not measured")
    assert set(row[2:]) == {""}
    assert list_reasons([comparison]) == ["gone was not measured: ImportError: no such module"]


def test_a_table_can_be_made_without_the_peer_that_all_are_compared_with() -> None:
    comparison = make_comparison(PARAGRAPHS, {"service": RECORDS["service"]})
    assert comparison.to_table().rows[0][3] == ""
    assert [row[0] for row in judge_engine([comparison]).rows] == ["paragraphs: padding, ours, end to end"]


def test_the_fastest_peer_is_one_whose_vectors_are_right() -> None:
    assert find_fastest_peer(make_comparison(PARAGRAPHS, RECORDS)) == "near"


def test_every_target_is_a_row_that_says_met_or_missed() -> None:
    rows = judge_engine([make_comparison(PARAGRAPHS, RECORDS), make_comparison(DOCUMENTS, RECORDS)]).rows
    verdicts = {name: (value, target) for name, value, target in rows}
    assert verdicts == {
        "paragraphs: end to end, to sentence-transformers": ("6.00× (5.00× to 7.00×)", "≥ 6×, met"),
        "paragraphs: end to end, to the fastest peer with cosine ≥ 0.999 (near)": ("2.00×", "≥ 1.8×, met"),
        "documents: end to end, to the fastest peer with cosine ≥ 0.999 (near)": ("2.00×", "≥ 1.2×, met"),
        "paragraphs: our engine, of the matrix limit": ("100.0%", "≥ 75%, met"),
        "paragraphs: our engine, of the bare loop on its shapes": ("0.90×", "≥ 0.97×, **missed**"),
        "documents: our engine, of the bare loop on its shapes": ("0.90×", "≥ 0.97×, **missed**"),
        "paragraphs: end to end, to our engine alone": ("0.50×", "≥ 0.96×, **missed**"),
        "documents: end to end, to our engine alone": ("0.50×", "≥ 0.96×, **missed**"),
        "paragraphs: padding, ours, end to end": ("2.0%", "≤ 3%, met"),
        "documents: padding, ours, end to end": ("2.0%", "≤ 3%, met"),
        "documents: peak memory of the worker, below sentence-transformers": ("70.0%", "≥ 60%, met"),
        "smallest cosine of a committed vector to fp32, all mixes": ("1.000000", "≥ 0.999, met"),
    }


def test_what_was_not_measured_is_no_row_and_every_target_has_one_where_all_was() -> None:
    mixes = (PARAGRAPHS, QUERIES, DOCUMENTS, SHORT_JOB)
    by_mix = {mix: make_comparison(mix, RECORDS) for mix in mixes}
    for target in TARGETS:
        assert list(target.judge(by_mix)), target
        assert not list(target.judge({}))
    without = {mix: make_comparison(mix, {"far": RECORDS["far"]}) for mix in mixes}
    assert not [measure for target in TARGETS for measure in target.judge(without)]


def test_a_short_job_is_judged_by_a_long_one_of_the_same_texts() -> None:
    slow = RECORDS | {"service": make_record("ours, end to end", [1.25, 1.25, 1.25])}
    rows = judge_engine([make_comparison(PARAGRAPHS, RECORDS), make_comparison(SHORT_JOB, slow)]).rows
    verdicts = {name: (value, target) for name, value, target in rows if name.startswith("a short job")}
    assert verdicts == {
        "a short job, to a long one, ours, end to end": ("80.0%", "≥ 93%, **missed**"),
        "a short job, to a long one, our engine alone": ("100.0%", "≥ 93%, met"),
    }


@pytest.mark.parametrize(
    ("flop", "copies", "reason"),
    [
        (30 * 0.75 * 300e9, 1, "one round takes half a minute"),
        (10 * 0.75 * 300e9, 3, "one of ten seconds is gone through three times"),
        (1e15, 1, "a long one is left as it is"),
        (1e9, 30, "and no text is read a hundred times"),
    ],
)
def test_a_mix_is_gone_through_until_a_pass_tells_a_rate(flop: float, copies: int, reason: str) -> None:
    assert plan_copies(flop, {"fp32": 150.0, "bf16": 300.0}) == copies, reason


# -- peers ---------------------------------------------------------------------------------------------------


def test_bf16_is_never_emulated() -> None:
    device = Device("cpu:0", CPU, 0, (0,), 1, 1 << 30)
    (peer,) = [peer for peer in PEERS if peer.precision == "bf16"]
    assert "AVX512-BF16" in str(find_obstacle(peer, device))
    with_bf16 = Device("cpu:0", CPU, 0, (0,), 1, 1 << 30, frozenset({"amx_bf16"}))
    assert find_obstacle(peer, with_bf16) is None


def test_every_requirement_of_a_peer_is_pinned_and_torch_is_ours() -> None:
    for name in {peer.environment for peer in PEERS if peer.environment}:
        lines = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert all("==" in pin for pin in pins), name
        assert "torch==2.13.0" in pins, name


def test_an_environment_that_cannot_be_made_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "WARNING: slow\nERROR: No matching distribution found for a==1\nHint: look again.\n"
    failed: subprocess.CompletedProcess[str] = subprocess.CompletedProcess([], 1, "", words)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: failed)
    (tmp_path / "odd.txt").write_text("a==1\n")
    with pytest.raises(BenchmarkFailed, match="odd could not be made: ERROR: No matching distribution found"):
        prepare_environment("odd", tmp_path / "home", tmp_path)


def test_an_environment_is_made_once_and_again_when_its_pins_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
        commands.append(command)
        (tmp_path / "home" / "x").mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "x.txt").write_text("a==1\n")
    for _ in range(2):
        assert prepare_environment("x", tmp_path / "home", tmp_path) == tmp_path / "home/x/bin/python"
    assert len(commands) == 2
    (tmp_path / "x.txt").write_text("a==2\n")
    prepare_environment("x", tmp_path / "home", tmp_path)
    assert len(commands) == 4


def test_a_copied_model_has_one_limit_wherever_a_system_looks_for_it(tmp_path: Path) -> None:
    card = Registry({}).card(DEFAULT_MODEL, weights=True)
    same = read_model_card("same", copy_with_limit(card, tmp_path / "same"))
    long = read_model_card("long", copy_with_limit(card, tmp_path / "long", 512))
    assert (same.max_tokens, long.max_tokens) == (256, 512)
    assert '"model_max_length": 256' in (tmp_path / "same" / "tokenizer_config.json").read_text()
    with pytest.raises(ModelError, match="512 positions"):
        copy_with_limit(card, tmp_path / "longer", 513)
