import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cases.host.exact_texts import count_word_tokens, make_texts
from benchmarks.cases.host.host import measure, plan_sizes
from benchmarks.cases.host.host_tables import BEFORE, NOW, judge, tabulate_micros, tabulate_rates
from benchmarks.cases.host.measured import OTHERS, Measured
from benchmarks.cases.host.timed import SHAPE, tabulate_timed
from benchmarks.order import BenchmarkFailed, Order
from benchmarks.probes.process_tree import CELERY_WORKER
from benchmarks.systems.host import tokenizer_pass
from benchmarks.systems.host.device_clock import DeviceClock
from benchmarks.systems.host.devices import KINDS, find_shape_cost, find_text_rate
from benchmarks.systems.host.engine_pass import EnginePass
from benchmarks.systems.host.host_stack import JobCost, count_seconds
from benchmarks.systems.host.made_up import MadeUpDevice
from benchmarks.systems.host.one_pass import run_pass
from benchmarks.systems.host.tokenizer_pass import TokenizerOrder, TokenizerPass
from benchmarks.systems.host.tree import FACTORIES, ROOT, link_tree

WORDS = ["alpha", "beta", "gamma", "a,b"]


def count(words: list[str]) -> list[int]:
    """As a tokenizer that splits at commas."""
    return [2 * word.count(",") + 1 for word in words]


def test_texts_have_exactly_the_tokens_that_were_asked_for_and_no_two_are_equal() -> None:
    word_tokens = count_word_tokens(WORDS, count, num_rounds=9)
    texts = make_texts(WORDS, word_tokens, num_tokens=4, first=0, num_texts=12)
    assert len(set(texts)) == len(texts) == 12
    assert {sum(count(text.split())) for text in texts} == {4}


def test_texts_further_on_are_others() -> None:
    word_tokens = count_word_tokens(WORDS, count, num_rounds=9)
    first, second = (make_texts(WORDS, word_tokens, 4, start, 4) for start in (0, 5))
    assert not set(first) & set(second)


def test_a_device_computes_one_batch_after_the_other_whoever_queues_them(tmp_path: Path) -> None:
    clocks = [DeviceClock(tmp_path / "clock", clock=lambda: 100.0) for _ in range(2)]
    assert clocks[0].queue(2.0, num_sequences=3, num_tokens=30) == 102.0
    assert clocks[1].queue(1.0, num_sequences=1, num_tokens=10) == 103.0
    reading = clocks[0].read()
    assert (reading.busy_seconds, reading.num_batches) == (3.0, 2)
    assert (reading.num_sequences, reading.num_tokens) == (4, 40)


def test_a_device_that_was_idle_begins_at_once(tmp_path: Path) -> None:
    now = 0.0
    clock = DeviceClock(tmp_path / "clock", clock=lambda: now)
    clock.queue(1.0, 1, 1)
    now = 50.0
    assert clock.queue(1.0, 1, 1) == 51.0


def test_a_made_up_device_takes_the_arithmetic_at_the_rate_of_its_batch_and_a_launch() -> None:
    device = MadeUpDevice(
        "fast", "clock", 1000.0, 0.5, 10.0, flop_per_token=10.0, flop_per_squared_length=1.0
    )
    # 10 tokens reach half of the rate: 100 + 25 + 25 operations at 500 a second.
    assert device.count_seconds(np.array([5, 5])) == pytest.approx(150 / 500 + 0.5)
    assert MadeUpDevice("null", "clock").count_seconds(np.array([5, 5])) == 0


def test_a_linked_tree_is_the_checkout_with_another_encoder(tmp_path: Path) -> None:
    linked = link_tree(ROOT, tmp_path / "tree")
    assert "made_up" in (linked / FACTORIES[0]).read_text()
    assert (linked / "worker/app.py").resolve() == ROOT / "worker/app.py"
    assert "made_up" not in (ROOT / FACTORIES[0]).read_text()
    assert (linked / "benchmarks").resolve() == ROOT / "benchmarks"


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkFailed, match="no checkout"):
        link_tree(tmp_path, tmp_path / "tree")


def test_a_job_lasts_from_its_first_claim_to_its_last_commit() -> None:
    job = {"started_at": "2026-11-22T21:00:01+00:00", "finished_at": "2026-11-22T21:00:03.500000+00:00"}
    assert count_seconds(job) == 2.5


def make_measured(seconds: float, own: float = 0.04) -> Measured:
    cpu = {CELERY_WORKER: 0.05, "postgres": 0.01, "flower": 0.002}
    job = JobCost(seconds, 1000, cpu, 2 * seconds * 0.95, {"tokenize": 0.1}, 0.0, 1)
    alone = EnginePass(1.0, 1000, 16_000, 0.06, 0.01, 0, 1000, 1_536_000, 1_540_000)
    counted = EnginePass(1.0, 1000, 16_000, 0.06, 0.01, 5000, 1000, 1_536_000, 1_540_000)
    return Measured([job], [alone], [TokenizerPass(0.75, 1000, 16_000, 0.06, own)], counted)


def test_targets_are_judged_by_the_shortest_texts_and_by_the_other_checkout() -> None:
    results = {16: {NOW: make_measured(1.0), BEFORE: make_measured(3.0)}}
    verdicts = {measure.name: measure.is_met for measure in judge(results, num_cores=2)}
    assert verdicts == {
        "end to end, to before": True,  # three times
        "engine alone, to the bare tokenizer": True,  # 75 %
        "cores busy, end to end": True,  # 95 %
        "processor time of the worker beside its tokenizer": True,  # 50 - 40 µs, though the library takes 60
    }
    assert not judge({100: {NOW: make_measured(1.0)}}, num_cores=2)


@pytest.mark.parametrize("own", [0.03, 0.06])  # 20 µs beside it, and -10
def test_a_worker_that_takes_too_much_or_less_than_its_own_tokenizer_meets_nothing(own: float) -> None:
    measures = judge({16: {NOW: make_measured(1.0, own)}}, num_cores=2)
    (beside,) = (measure for measure in measures if "beside its tokenizer" in measure.name)
    assert beside.is_met is False


def test_what_is_beside_the_tokenizer_is_told_pass_by_pass() -> None:
    both = [make_measured(1.0, own) for own in (0.04, 0.02)]
    found = Measured([each.jobs[0] for each in both], tokenizer=[each.tokenizer[0] for each in both])
    spread = found.beside_tokenizer_micros()
    assert (spread.low, spread.high) == pytest.approx((10, 30))


def test_the_own_tokenizer_is_timed_in_the_checkout(tmp_path: Path) -> None:
    words = {"a": 0, "b": 1}
    file = {"version": "1.0", "model": {"type": "WordLevel", "vocab": words, "unk_token": "b"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps(["a b"] * 2000))
    order = TokenizerOrder(str(texts), str(tmp_path), 16)
    answer = TokenizerPass(**run_pass(tokenizer_pass.__name__, asdict(order), ROOT, {}))
    assert answer.num_texts == 2000
    assert answer.own_cpu_seconds > 0


def test_processor_time_is_told_by_process_and_none_is_lost() -> None:
    found = make_measured(1.0)
    assert found.process_micros(CELERY_WORKER) == pytest.approx(50)
    assert found.process_micros(OTHERS) == pytest.approx(2)
    assert found.host_micros() == pytest.approx(62)


def test_each_row_says_its_tokens_and_its_checkout_where_there_are_two() -> None:
    both = {16: {NOW: make_measured(1.0), BEFORE: make_measured(3.0)}}
    assert [row[0] for row in tabulate_rates(both, 2).rows] == ["16 tokens, now", "16 tokens, before"]
    assert [row[0] for row in tabulate_micros({16: {NOW: make_measured(1.0)}}).rows] == ["16 tokens"]


def test_fewer_texts_are_fewer_of_every_length() -> None:
    assert plan_sizes(None)[16] == 100_000
    assert plan_sizes(50_000) == {16: 50_000, 100: 20_000, 256: 10_000}


def test_an_h100_computes_as_many_texts_of_bert_base_as_its_efficiency_says() -> None:
    device = KINDS["H100"].make_device(find_shape_cost(SHAPE), Path("clock"))
    assert find_text_rate(device, 100) == pytest.approx(25_000, rel=0.1)
    assert find_text_rate(device, 16) == pytest.approx(160_000, rel=0.1)


def test_the_cost_of_a_shape_is_that_of_its_layers_alone() -> None:
    cost = find_shape_cost(SHAPE)
    assert (cost.num_layers, cost.hidden_size) == (12, 768)
    assert cost.num_multiplied_parameters == 85_054_464  # of BERT-base's 109 million, the rest are looked up


def test_fewer_than_three_passes_are_refused() -> None:
    order = Order(None, None, repeat=2)  # type: ignore[arg-type]
    with pytest.raises(BenchmarkFailed, match="give --repeat 3 or more"):
        measure(order)


def test_a_second_worker_is_compared_with_one_on_the_same_device() -> None:
    one, two = (JobCost(seconds, 1000, {}, 1.0, {}, 1.0, 10) for seconds in (4.0, 2.5))
    jobs = {("H100", 100): [one], ("H100, 2 workers", 100): [two]}
    table = tabulate_timed(jobs, {name: MadeUpDevice(name, "clock", 1e9, 1e-3) for name, _ in jobs})
    assert [(row[0], row[3], row[-1]) for row in table.rows] == [
        ("H100: 100 tokens", "25.0%", ""),
        ("H100, 2 workers: 100 tokens", "40.0%", "1.60×"),
    ]
