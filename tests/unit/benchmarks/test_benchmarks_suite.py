import io
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import suite
from benchmarks.__main__ import app
from benchmarks.cases.console import Visit, judge_visits
from benchmarks.cases.export import count_rows
from benchmarks.cases.idle import judge_shares
from benchmarks.order import BenchmarkFailed, Order
from benchmarks.probes.machine import Machine
from benchmarks.results.report import Report
from benchmarks.results.spread import Spread
from benchmarks.steps import Steps
from benchmarks.systems.own.own_stack import stack_command
from benchmarks.systems.protocol import Pass
from benchmarks.systems.turns import Record
from benchmarks.texts import cut_chunks, list_docstrings, list_lines
from vectormill.corpus import take_evenly
from vectormill.domain.jobs.chunk_size import SMALLEST_CHUNK_TOKENS


def test_texts_are_taken_evenly_from_the_whole_corpus() -> None:
    assert take_evenly(range(10), 5) == [0, 2, 4, 6, 8]
    assert take_evenly(range(3), 5) == [0, 1, 2]
    assert take_evenly(range(7), 3) == [0, 2, 4]


def test_chunks_hold_all_values_in_their_order() -> None:
    texts = [b"%d" % number for number in range(5)]
    assert cut_chunks(texts, lambda text: 1, 2) == [texts[:2], texts[2:4], texts[4:]]
    assert cut_chunks(texts, lambda text: SMALLEST_CHUNK_TOKENS, 9) == [[text] for text in texts]


def test_lines_are_short_real_texts_under_keys_that_differ_even_when_they_are_used_again() -> None:
    items = list_lines(100_000)
    assert len({item["key"] for item in items}) == len(items) == 100_000
    assert all(item["text"].strip() and "\n" not in item["text"] for item in items)


def test_fewer_docstrings_are_some_of_all_of_them() -> None:
    some = list_docstrings(50)
    assert len(some) == 50
    assert {item["key"] for item in some} <= {item["key"] for item in list_docstrings()}


def test_padding_waste_is_a_share_of_what_was_computed() -> None:
    assert Pass(1.0, num_tokens=75, num_computed_tokens=100).padding_waste == 0.25
    assert Pass(1.0, num_tokens=0, num_computed_tokens=0).padding_waste == 0


def test_a_speed_up_is_taken_repetition_by_repetition() -> None:
    ours = Record("ours", passes=[Pass(1.0, 1, 1), Pass(2.0, 1, 1), Pass(4.0, 1, 1)])
    peer = Record("peer", passes=[Pass(3.0, 1, 1), Pass(8.0, 1, 1), Pass(8.0, 1, 1)])
    assert ours.speed_against(peer) == Spread(3.0, 2.0, 4.0)
    assert ours.rate(8) == Spread(4.0, 2.0, 8.0)


@pytest.mark.parametrize(
    ("spent", "verdict"), [({"api": 0.9, "postgres": 0.8}, "met"), ({"api": 2.0}, "missed")]
)
def test_an_idle_stack_is_judged_by_all_of_its_processes_together(
    spent: dict[str, float], verdict: str
) -> None:
    report = judge_shares(spent, seconds=60)
    (table,) = report.tables
    assert verdict in table.rows[0][2]
    assert [row[0] for row in table.rows[1:]] == list(spent)


def test_rows_of_an_exported_file_are_counted_in_every_format(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", np.zeros((3, 2), dtype=np.float32))
    pyarrow.parquet.write_table(pyarrow.table({"key": ["a", "b"]}), tmp_path / "vectors.parquet")
    (tmp_path / "vectors.ndjson").write_text('{"key": "a"}\n')
    counts = {kind: count_rows(tmp_path / f"vectors.{kind}", kind) for kind in ("npy", "parquet", "ndjson")}
    assert counts == {"npy": 3, "parquet": 2, "ndjson": 1}


def test_a_measured_stack_uses_no_server_of_the_user_and_no_model_converted_before() -> None:
    command = stack_command(Path("/fresh"), {"VECTORMILL_WORKER_DEVICES": "cuda:0"})
    assert command[0] == "env"
    assert "VECTORMILL_CACHE_DIR=/fresh" in command
    assert "VECTORMILL_WORKER_DEVICES=cuda:0" in command
    assert "VECTORMILL_WORKER_DEVICES=cpu" not in command
    for name in ("VECTORMILL_DATABASE_URL", "VECTORMILL_REDIS_URL"):
        assert command[command.index(name) - 1] == "-u"


def test_a_long_list_of_the_console_is_judged_beside_a_short_one() -> None:
    few, many = [Visit(0.2, 0.05)] * 3, [Visit(0.3, 0.1)] * 3
    (table,) = judge_visits(few, many, 10_000).tables
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["first paint, 10,000 jobs"] == ("0.3 s", "< 1 s, met")
    assert rows["the long list to the short one"] == ("1.50×", "≤ 1.2×, **missed**")


def test_steps_are_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with Steps(Console(file=out)) as steps:
        steps.begin("export", 2)
        steps.step("one")
        steps.step("two")
        steps.end()
    assert out.getvalue().splitlines() == ["export 1/2 after 0 s: one", "export 2/2 after 0 s: two"]


def test_a_benchmark_that_announced_other_steps_is_told() -> None:
    with Steps(Console(file=io.StringIO())) as steps:
        steps.begin("export", 2)
        steps.step("one")
        with pytest.raises(AssertionError, match="took 1 steps"):
            steps.end()


def test_a_benchmark_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(order: Order) -> Report:
        order.steps.begin("broken", 3)
        raise BenchmarkFailed("The job ended failed.")

    machine = Machine("a processor", 2, ("avx2",), 8 << 30, "Linux", {"torch": "2"}, {"fp32": 99.5})
    monkeypatch.setattr(suite, "BENCHMARKS", {"broken": fail, "machine": suite.BENCHMARKS["machine"]})
    with Steps(Console(file=io.StringIO())) as steps:
        failure, report = suite.run_benchmarks(["broken", "machine"], Order(machine, steps))
    assert str(failure) == "broken was not measured: The job ended failed."
    assert isinstance(report, Report)
    assert ("matrix product, fp32", "99.5 GFLOP/s") in report.tables[0].rows
    assert (
        machine.describe()
        == "a processor, 2 cores (avx2), 8 GiB, Linux; matrix product fp32 99.5 GFLOP/s; torch 2."
    )


def test_a_quick_look_is_never_written_into_the_readme() -> None:
    result = CliRunner().invoke(app, ["export", "--items", "10", "--write"])
    assert result.exit_code == 2
    assert "--items" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["engine", "--mix", "poems"], "there are paragraphs, queries"),
        (["engine", "--system", "tei"], "there are service, engine, bare-openvino, sentence-transformers"),
        (["engine", "--system", "infinity", "--device", "cuda"], "sentence-transformers-32"),  # not on a GPU
        (["engine", "--model-shape", "large"], "there are bert-base"),
        (["engine", "--write", "--mix", "queries"], "leave --mix away"),
        (["engine", "--write", "--device", "cuda"], "only shown"),
    ],
)
def test_a_choice_that_cannot_be_measured_is_refused_before_anything_starts(
    arguments: list[str], words: str
) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "500"})
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_an_unknown_benchmark_is_refused_with_the_names_that_exist() -> None:
    result = CliRunner().invoke(app, ["speed"])
    assert result.exit_code == 2
    assert "there is no benchmark 'speed'" in result.output
    assert "main_job" in result.output
