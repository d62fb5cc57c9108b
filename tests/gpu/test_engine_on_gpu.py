"""The whole engine on a GPU: the right one, its memory, batches that do not fit, small weights, several GPUs."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.gpu.cramped import CRAMPED_BYTES
from tests.gpu.devices import NEEDS_GPU, NEEDS_TWO_GPUS, find_device
from tests.rank_processes import starting_engines
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from vectormill.settings import process_environment
from worker.devices.detect import DeviceSampler, detect_inventory
from worker.devices.device import device_environment, parse_devices
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest
from worker.placement.placement import PlanSettings
from worker.placement.planner import plan_placement
from worker.placement.strategies import SHARED
from worker.runner.starter import Sharing
from worker.settings import WorkerSettings

CARD = Registry({}).card(DEFAULT_MODEL, weights=True)
SPEC = make_spec(CARD, EncodingOptions())
TEXTS = [f"text number {number} of a few more, " + "and longer " * (number % 40) for number in range(200)]

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeEngine]:
    """Starts engines, and stops them at the end."""

    def make(kind: str, *, sharing: Sharing | None = None, factory: str = "", **settings: Any) -> Engine:
        device = find_device(kind) if sharing is None else sharing.devices[0]
        more: dict[str, Any] = {"factory": factory} if factory else {}
        cache = tmp_path_factory.mktemp("cache")
        return start(Engine(CARD, device, WorkerSettings(**settings), cache, sharing=sharing, **more))

    with starting_engines() as start:
        yield make


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine) -> NDArray[np.float32]:
    """[n, dim] of TEXTS: fp32 on the processor, with padding."""
    return encode(make_engine("cpu", backend="torch", attention="padded"), TEXTS)


def encode(engine: Engine, texts: list[str]) -> NDArray[np.float32]:
    request = EncodeRequest("r", SPEC, [text.encode() for text in texts], False, 100_000)
    result = engine.encode(request, threading.Event())
    assert not result.failures
    return result.vectors


def smallest_cosine(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float((found * expected).sum(axis=1).min())  # of unit length


@pytest.mark.parametrize(
    ("device", "precision", "smallest"),
    [
        ("cpu", "fp32", 0.9999),
        pytest.param("cuda", "fp32", 0.9999, marks=NEEDS_GPU),
        pytest.param("cuda", "auto", 0.999, marks=NEEDS_GPU),
        pytest.param("cuda", "fp16", 0.999, marks=NEEDS_GPU),
        # The cosine that rounding alone leaves, minus a margin (vectormill/models/rounding.py).
        pytest.param("cuda", "int8", 0.998, marks=NEEDS_GPU),
    ],
)
def test_every_precision_gives_the_vectors_of_fp32_on_a_processor(
    make_engine: MakeEngine, expected: NDArray[np.float32], device: str, precision: str, smallest: float
) -> None:
    engine = make_engine(device, backend="torch", precision=precision)
    assert smallest_cosine(encode(engine, TEXTS), expected) >= smallest
    report = engine.report()
    assert report["device"]["value"] == f"{device}:0"
    assert report["num_out_of_memory"] == 0
    assert report["memory_bytes"] > 0
    assert 0 < report["memory_used_share"] < 1
    assert (report["device_memory_bytes"] > 10_000_000) == (device == "cuda")


@NEEDS_GPU
def test_a_batch_that_does_not_fit_is_halved_until_it_does(make_engine: MakeEngine) -> None:
    """The allocator is torch's own, and so is its error; only the memory is smaller than the GPU's."""
    engine = make_engine(
        "cuda", factory="tests.gpu.cramped:load_cramped_encoder", max_batch_tokens=1 << 18, reuse_bytes=0
    )
    texts = [f"{number} " + "many words " * 60 for number in range(4000)]
    vectors = encode(engine, texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    report = engine.report()
    assert report["num_out_of_memory"] > 0
    assert report["num_restarts"] == 0, "an out-of-memory ends no process"
    assert report["device_memory_bytes"] <= CRAMPED_BYTES
    num_before = report["num_out_of_memory"]
    encode(engine, [f"again {text}" for text in texts[:500]])
    assert engine.report()["num_out_of_memory"] == num_before, "it has learned what fits"


@NEEDS_GPU
@pytest.mark.parametrize("place", range(len(detect_inventory().accelerators)))
def test_a_process_pinned_to_a_gpu_sees_that_one_alone(place: int) -> None:
    device = detect_inventory().accelerators[place]
    program = (
        "import json, torch; seen = torch.cuda.get_device_properties(0);"
        "print(json.dumps([torch.cuda.device_count(), str(seen.uuid), seen.total_memory, seen.major, seen.minor]))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        env=process_environment() | device_environment(device),
        capture_output=True,
        text=True,
        check=True,
    )
    count, uuid, total_bytes, major, minor = json.loads(said.stdout)
    assert count == 1
    assert device.uuid.startswith("MIG-") or device.uuid == f"GPU-{uuid}"
    assert total_bytes == pytest.approx(device.memory_bytes, rel=0.05)
    assert device.features == {f"sm_{major}{minor}"}


@NEEDS_GPU
def test_the_driver_tells_how_much_of_a_gpu_is_in_use(make_engine: MakeEngine) -> None:
    engine = make_engine("cuda")
    encode(engine, TEXTS)
    use = DeviceSampler(find_device("cuda"), engine.find_pid).sample()
    assert use.memory_used_bytes is not None
    assert 100_000_000 < use.memory_used_bytes < use.memory_total_bytes, "a CUDA context alone is larger"


@NEEDS_TWO_GPUS
@pytest.mark.parametrize("strategy", SHARED)
@pytest.mark.parametrize("attention", ["auto", "padded"])
def test_gpus_that_share_a_model_give_the_vectors_of_a_processor(
    make_engine: MakeEngine, expected: NDArray[np.float32], strategy: str, attention: str
) -> None:
    """Over NCCL, between processes each of which sees one GPU."""
    inventory, names = detect_inventory(), "cuda:0,cuda:1"
    asked = PlanSettings("bf16", CARD.max_tokens, names, strategy)
    placement = plan_placement(inventory, CARD.find_shape(), asked)
    sharing = Sharing(placement.replicas[0], tuple(parse_devices(names, inventory)))
    engine = make_engine("cuda", sharing=sharing, precision="bf16", attention=attention, reuse_bytes=0)
    report = engine.report()
    assert (report["is_packed"], report["is_queued"]) == (attention == "auto", True)
    for _ in range(3):  # again, with communicators that are there
        assert smallest_cosine(encode(engine, TEXTS), expected) >= 0.999
    assert engine.report()["device"]["value"] == names.replace(",", "+")
