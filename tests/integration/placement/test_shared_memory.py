"""A model that two devices share, one of which runs out of memory: under a limit that the kernel enforces on one rank.

The limit is set from outside on the process's address space, so that large batches fail in the allocator itself while
the other rank waits inside a collective. Only Linux obeys it.
"""

import resource
import sys
from collections.abc import Iterator
from functools import partial

import numpy as np
import psutil
import pytest

from tests.faulty_engine import runner_pids
from tests.integration.engine.test_engine_memory import encode, make_texts
from tests.models import read_card, write_wide_bert
from tests.rank_processes import TWO_DEVICES, share_between_two
from vectormill.models.model_card import ModelCard
from worker.devices.detect import DeviceSampler
from worker.engine.engine import Engine
from worker.placement.strategies import TENSOR
from worker.settings import WorkerSettings

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux",
        reason="RLIMIT_AS is not obeyed outside Linux, so that no allocation can be made to fail",
    ),
]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return read_card(write_wide_bert(tmp_path_factory.mktemp("wide")))


@pytest.fixture(scope="module")
def engine(card: ModelCard, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    sharing = share_between_two(card, TENSOR)
    settings = WorkerSettings(precision="fp32", max_batch_tokens=4096)
    engine = Engine(card, sharing.devices[0], settings, tmp_path_factory.mktemp("cache"), sharing=sharing)
    engine.start()
    yield engine
    engine.stop()


def test_the_report_tells_the_memory_of_every_rank(engine: Engine) -> None:
    report = engine.report()
    ranks = report["memory_of_ranks"]
    assert [rank["device"] for rank in ranks] == TWO_DEVICES.split(",")
    assert all(rank["peak_memory_bytes"] >= rank["memory_bytes"] > 100 << 20 for rank in ranks)
    assert report["memory_bytes"] == sum(rank["memory_bytes"] for rank in ranks)
    assert report["memory_used_share"] == max(rank["memory_used_share"] for rank in ranks)


def test_each_rank_on_a_processor_is_sampled_as_its_own_process(engine: Engine, card: ModelCard) -> None:
    samplers = [
        DeviceSampler(device, partial(engine.find_pid, rank))
        for rank, device in enumerate(share_between_two(card, TENSOR).devices)
    ]
    first = [sampler.sample() for sampler in samplers]
    encode(engine, card, make_texts(16, 250))
    second = [sampler.sample() for sampler in samplers]
    for pid, before, after in zip(runner_pids(), first, second, strict=True):
        assert after.memory_used_bytes == pytest.approx(psutil.Process(pid).memory_info().rss, rel=0.05)
        assert (before.utilisation is None, 0 < (after.utilisation or 0) <= 1) == (True, True)


def test_a_batch_that_does_not_fit_on_one_rank_is_tried_in_parts_by_a_new_replica(
    engine: Engine, card: ModelCard
) -> None:
    texts = make_texts(16, 250)
    expected = np.concatenate([encode(engine, card, [text]).vectors for text in texts])
    ranks = [psutil.Process(pid) for pid in runner_pids()]
    assert len(ranks) == 2
    # A token takes 17 kB of each rank, so that 4,096 of them do not fit and 2,048 do.
    limit = ranks[1].memory_info().vms + (48 << 20)
    resource.prlimit(ranks[1].pid, resource.RLIMIT_AS, (limit, limit))

    result = encode(engine, card, [f"{text} again" for text in texts])
    assert not result.failures
    assert float((result.vectors * expected).sum(axis=1).min()) >= 0.99, "one word more in each"
    report = engine.report()
    assert report["num_out_of_memory"] == 1
    assert report["num_restarts"] == 1, "the rank that waited for it cannot go on"
    assert report["budgets"]["up to 256"]["max_batch_tokens"] <= 2048
    assert report["budgets"]["up to 64"]["max_batch_tokens"] == 4096, "another length class"
    assert not any(rank.is_running() for rank in ranks)
