"""The benchmarks can be asked for, and each has a file and a place in the README."""

import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

from benchmarks.__main__ import make_parser
from benchmarks.harness import QUESTIONS, Harness
from benchmarks.models import ModelCost, Shape, bert, qwen3, write_random_model
from benchmarks.questions.card import Row, Step, make_report
from benchmarks.tables import README, replace_section


def test_every_question_is_in_the_help_and_has_a_file_and_a_place_in_the_readme() -> None:
    text = README.read_text(encoding="utf-8")
    for name, question in QUESTIONS.items():
        assert f"{name:<12} {question}" in make_parser().format_help()
        assert callable(import_module(f"benchmarks.questions.{name}").run)
        assert "anew" in replace_section(text, name, "anew")


def test_a_quick_run_of_the_card_measures_every_step_on_a_processor(tmp_path: Path) -> None:
    report = Harness(is_quick=True, minutes=30.0, state=tmp_path).answer("card")
    steps = json.loads((tmp_path / "card.json").read_text())["steps"]
    assert {name: step["flaw"] for name, step in steps.items()} == dict.fromkeys(steps, "")
    assert all(step["rows"] for step in steps.values())
    models, _, kernels, peers, service = report.tables
    assert [row[0] for row in models.rows] == ["tiny, eager, 16", "tiny, fused, 16"]
    assert kernels.rows
    assert len(peers.rows) == 1
    assert [row[0] for row in service.rows] == [
        f"tiny, 16 tokens, to {to}, 1 workers" for to in ("Parquet", "Postgres")
    ]


def test_the_card_says_whether_the_fastest_way_reaches_its_share_and_what_the_target_costs() -> None:
    figures = {
        "shape": "bert-base",
        "length": 100,
        "idle": None,
        "launches": 1,
        "peak_bytes": 1,
        "kernels": [],
    }
    models: list[Row] = [
        {**figures, "way": "eager", "tokens_per_second": 1e6, "tflops": 200.0},
        {**figures, "way": "compiled", "tokens_per_second": 2e6, "tflops": 400.0},
    ]
    ceilings: list[Row] = [{"name": "product", "tflops": 800.0}, {"name": "bert-base", "tflops": 700.0}]
    steps = [
        Step(name, (), 1.0, rows) for name, rows in (("ceilings", ceilings), ("tests", []), ("model", models))
    ]
    (row,) = make_report(steps, {}, Harness()).tables[1].rows
    # 60 % of the product are 2.4 million tokens/s; a billion take 417 seconds.
    assert row[:3] == ("bert-base", "compiled", "50.0%")
    assert "missed" in row[3]
    assert row[4:] == ("2,400,000", "0.231", "0.405")


def test_a_step_that_is_late_keeps_what_it_printed_and_leaves_no_process(tmp_path: Path) -> None:
    program = "import subprocess, sys; print('{\"name\": 1}', flush=True); subprocess.run(['sleep', '99'])"
    step = Step("late", (sys.executable, "-c", program), 1.0, [])
    step.run(tmp_path, 3.0)
    assert (step.rows, step.flaw) == ([{"name": 1}], "it was ended after 3 s")


def test_a_benchmark_without_a_stack_is_measured_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    report = Harness(items=2000, repeat=1).answer("submission")
    assert "items/s from the first byte to 202, 2,000 items" in report.to_markdown("today", "a machine")
    assert "submission 1 of 1" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [bert("b", 2, 32, 4, 1), qwen3("q", 2, 32, 48, 4, 1, head_dim=16)])
def test_operations_are_those_that_torch_counts(shape: Shape, tmp_path: Path) -> None:
    cost = ModelCost.of(write_random_model(shape, tmp_path))
    model = AutoModel.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    model.pooler = None
    lengths = (5, 64)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        for length in lengths:
            model(input_ids=torch.ones((1, length), dtype=torch.long))
    attended = 4 * cost.num_layers * cost.attention_size * sum(length**2 for length in lengths)
    # torch computes what a causal mask hides, too.
    hidden = attended / 2 if shape.model_type == "qwen3" else 0
    # Angles of rotary positions are a product, too, of one number with one number.
    assert cost.count_flop(np.array(lengths)) == pytest.approx(counter.get_total_flops() - hidden, rel=1e-3)
