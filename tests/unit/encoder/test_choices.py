"""The choice of device, backend, precision and attention, each with its reason."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from vectormill.domain.errors import ConfigurationError, ModelError
from vectormill.models.families import FAMILIES
from worker.devices.backends import BACKENDS, Backend
from worker.devices.device import (
    CPU,
    CUDA,
    MPS,
    Device,
    Inventory,
    device_environment,
    divide_gpus,
    parse_devices,
    thread_environment,
)
from worker.encoder.backends import list_backends
from worker.encoder.choice import (
    AttentionShape,
    choose_attention,
    choose_extraction_precision,
    choose_precision,
    find_arithmetic,
    read_attention_shape,
)
from worker.encoder.encoder import AUTO, Encoder
from worker.settings import load_worker_settings

GPUS = tuple(Device(f"cuda:{i}", "cuda", i, (), 4, 80 << 30, frozenset({"sm_90"})) for i in range(2))
PROCESSOR = Inventory((), ((0, 4), (1, 5), (2, 6)), 64 << 30, frozenset({"avx512f"}), "a processor")
MACHINE = replace(PROCESSOR, accelerators=GPUS)
PLAIN_CPU = parse_devices("cpu", PROCESSOR)[0]
OLD_GPU = replace(GPUS[0], features=frozenset({"sm_75"}), description="a Turing")
APPLE_GPU = Device("mps:0", "mps", 0, (), 4, 16 << 30)
BF16_CPU = replace(PLAIN_CPU, features=frozenset({"amx_bf16"}))


@pytest.mark.parametrize(
    ("text", "inventory", "names"),
    [
        ("auto", MACHINE, ["cuda:0", "cuda:1"]),
        ("auto", PROCESSOR, ["cpu:0"]),
        ("cpu", MACHINE, ["cpu:0"]),
        ("cuda", MACHINE, ["cuda:0", "cuda:1"]),
        ("cuda:1", MACHINE, ["cuda:1"]),
        ("cpu:0, cpu:1", MACHINE, ["cpu:0", "cpu:1"]),
        ("cuda:0,cpu:0", MACHINE, ["cuda:0", "cpu:0"]),
    ],
)
def test_devices_are_named_as_users_write_them(text: str, inventory: Inventory, names: list[str]) -> None:
    assert [device.name for device in parse_devices(text, inventory)] == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda", "Unknown device 'cuda'"),
        ("cuda:0", "this machine has: cpu"),
        ("cpu:0,cpu:2", "2 CPU devices are cpu:0 to cpu:1"),
        ("cpu:0,cpu:0", "twice"),
        ("cpu:0,cpu:1,cpu:2,cpu:3", "4 CPU devices need at least as many cores, but only 3 are available"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_devices(text, PROCESSOR)


def test_workers_that_share_a_gpu_divide_its_memory_and_the_threads_of_the_host() -> None:
    names, inventory = divide_gpus("cuda:0*3, cuda:1", MACHINE)
    assert names == "cuda:0.0,cuda:0.1,cuda:0.2,cuda:1"
    *parts, other = parse_devices(names, inventory)
    whole = GPUS[0]
    assert {device_environment(part)["CUDA_VISIBLE_DEVICES"] for part in parts} == {"0"}
    assert [part.memory_bytes for part in parts] == [whole.memory_bytes // 3] * 3
    assert {(part.card, part.num_threads) for part in parts} == {("cuda:0", max(1, whole.num_threads // 3))}
    assert other == GPUS[1]
    assert divide_gpus("cuda*2", MACHINE)[0] == "cuda:0.0,cuda:0.1,cuda:1.0,cuda:1.1"
    assert divide_gpus("auto", MACHINE) == ("auto", MACHINE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda:0*", "a number of workers"),
        ("cuda:0*0", "a number of workers"),
        ("cpu*2", "only a GPU"),
        ("auto*2", "only a GPU"),
        ("cuda:7*2", "Unknown device 'cuda:7'"),
    ],
)
def test_what_cannot_be_shared_by_workers_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        divide_gpus(text, PROCESSOR if text == "auto*2" else MACHINE)


def test_cpu_devices_share_the_physical_cores_and_no_core_is_in_two() -> None:
    first, second = parse_devices("cpu:0,cpu:1", PROCESSOR)
    assert (first.cores, first.num_threads) == ((0, 1, 4, 5), 2)
    assert (second.cores, second.num_threads) == ((2, 6), 1)
    assert parse_devices("cpu", PROCESSOR)[0].cores == (0, 1, 2, 4, 5, 6)


def test_a_process_sees_its_own_device_only_and_as_many_threads_as_its_cores() -> None:
    assert device_environment(GPUS[1])["CUDA_VISIBLE_DEVICES"] == "1"
    named = replace(GPUS[1], uuid="GPU-7f3c")  # which means the same device in any numbering
    assert device_environment(named)["CUDA_VISIBLE_DEVICES"] == "GPU-7f3c"
    environment = {"PATH": "/bin", "OMP_NUM_THREADS": "64"} | device_environment(PLAIN_CPU, 3)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert (environment["OMP_NUM_THREADS"], environment["RAYON_NUM_THREADS"], environment["PATH"]) == (
        "3",
        "3",
        "/bin",
    )


def test_a_replica_sees_what_its_launcher_saw_so_that_it_finds_its_device_by_the_same_name() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in thread_environment(3)
    assert thread_environment(3)["RAYON_NUM_THREADS"] == "3"
    fed = thread_environment(4, num_tokenizer_threads=16)  # of a GPU
    assert (fed["OMP_NUM_THREADS"], fed["RAYON_NUM_THREADS"]) == ("4", "16")


def everything(backend: Backend) -> bool:
    return True


def nothing_but_torch(backend: Backend) -> bool:
    return backend.name == "torch"


@pytest.mark.parametrize(
    ("wanted", "device", "is_installed", "expected"),
    [
        ("auto", PLAIN_CPU, everything, ["openvino", "torch"]),
        ("auto", PLAIN_CPU, nothing_but_torch, ["torch"]),
        ("auto", GPUS[0], everything, ["torch"]),
        ("auto", APPLE_GPU, everything, ["torch"]),
        ("torch", PLAIN_CPU, everything, ["torch"]),  # a wish has no substitute
        ("openvino", PLAIN_CPU, everything, ["openvino"]),
    ],
)
def test_backends_are_listed_in_order_of_preference_with_a_reason(
    wanted: str, device: Device, is_installed: Callable[[Backend], bool], expected: list[str]
) -> None:
    found = list_backends(wanted, device, is_installed)
    assert [backend.name for backend, _ in found] == expected
    assert all(reason for _, reason in found)


def test_packed_attention_is_looked_for_where_it_is() -> None:
    [(backend, reason)] = list_backends("auto", PLAIN_CPU, everything, must_pack=True)
    assert backend.name == "torch"
    assert "openvino does not support packed attention" in reason
    with pytest.raises(
        ModelError, match="openvino does not support packed attention, which was requested; use auto or torch"
    ):
        list_backends("openvino", PLAIN_CPU, everything, must_pack=True)


def test_a_backend_that_cannot_run_is_refused_with_the_better_choice() -> None:
    with pytest.raises(ModelError, match="runs only on cpu, not on cuda:0; use auto or torch"):
        list_backends("openvino", GPUS[0], everything)
    with pytest.raises(ModelError, match="pip install openvino"):
        list_backends("openvino", PLAIN_CPU, nothing_but_torch)
    with pytest.raises(ModelError, match="No backend can run a model on cuda:0: openvino runs only on cpu"):
        list_backends("auto", GPUS[0], lambda backend: backend.name == "openvino")


def test_every_backend_of_the_table_can_be_imported_and_is_a_setting() -> None:
    for backend in BACKENDS.values():
        module, _, name = backend.loader.partition(":")
        assert Encoder in getattr(importlib.import_module(module), name).__mro__
        assert load_worker_settings(backend=backend.name).backend == backend.name
    with pytest.raises(ConfigurationError, match="must be one of auto, openvino, torch"):
        load_worker_settings(backend="onnx")


@pytest.mark.parametrize(
    ("wanted", "device", "expected", "arithmetic"),
    [
        ("auto", PLAIN_CPU, "fp32", "fp32"),  # would emulate bf16
        ("auto", BF16_CPU, "bf16", "bf16"),
        ("auto", GPUS[0], "bf16", "bf16"),
        ("auto", OLD_GPU, "fp16", "fp16"),  # Turing and older
        ("auto", APPLE_GPU, "fp32", "fp32"),
        ("fp16", OLD_GPU, "fp16", "fp16"),
        ("int8", PLAIN_CPU, "int8", "fp32"),  # restored to what the device computes well
        ("int8", BF16_CPU, "int8", "bf16"),
        ("int8", GPUS[0], "int8", "bf16"),
        ("int8", APPLE_GPU, "int8", "fp32"),
        ("int8", OLD_GPU, "int8", "fp16"),
    ],
)
def test_sixteen_bits_are_computed_only_where_the_device_has_them(
    wanted: str, device: Device, expected: str, arithmetic: str
) -> None:
    choice = choose_precision(wanted, device)
    assert choice.value == expected
    assert choice.reason
    assert find_arithmetic(choice.value, device) == arithmetic


@pytest.mark.parametrize(
    ("wanted", "device", "better"),
    [
        ("bf16", PLAIN_CPU, "Use fp32"),
        ("fp16", BF16_CPU, "use bf16"),
        ("fp16", PLAIN_CPU, "use fp32"),
        ("bf16", OLD_GPU, "use fp16"),
    ],
)
def test_a_slow_precision_is_refused_with_the_better_choice(wanted: str, device: Device, better: str) -> None:
    with pytest.raises(ModelError, match=better):
        choose_precision(wanted, device)


def test_a_family_that_overflows_fp16_never_computes_in_it() -> None:
    for model_type, family in FAMILIES.items():
        chosen = choose_precision(AUTO, OLD_GPU, model_type).value
        assert chosen == ("fp32" if family.overflows_fp16 else "fp16")
    for wanted in ("fp16", "int8"):
        with pytest.raises(ModelError, match=r"gemma2 are too large for fp16.*use fp32"):
            choose_precision(wanted, OLD_GPU, "gemma2")
    with pytest.raises(ModelError, match="would emulate bf16; use fp32"):
        choose_precision("bf16", OLD_GPU, "gemma2")
    assert {choose_extraction_precision(wanted, OLD_GPU).value for wanted in (AUTO, "fp32")} == {"fp32"}


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VECTORMILL_WORKER_BACKEND", "openvino")
    monkeypatch.setenv("VECTORMILL_WORKER_SLOTS", "3")
    settings = load_worker_settings(backend="torch", devices=None)
    assert (settings.backend, settings.slots, settings.devices) == ("torch", 3, "auto")


def device(kind: str, *features: str) -> Device:
    return Device(
        f"{kind}:0",
        kind,
        0,
        (),
        1,
        1 << 30,
        frozenset(features),
        "a T4" if "sm_75" in features else "a device",
    )


A_CPU, AMPERE, TURING, APPLE = device(CPU), device(CUDA, "sm_80"), device(CUDA, "sm_75"), device(MPS)


@pytest.mark.parametrize(
    ("model_type", "head_dim", "where", "precision", "expected", "reason"),
    [
        ("bert", 64, AMPERE, "bf16", "packed", "no padding"),
        ("xlm-roberta", 64, AMPERE, "fp16", "packed", "no padding"),
        ("modernbert", 64, AMPERE, "bf16", "packed", "no padding"),
        ("qwen3", 128, AMPERE, "bf16", "packed", "no padding"),
        ("mistral", 256, AMPERE, "bf16", "packed", "no padding"),  # the largest head the kernel takes
        # A capability not told is found by the probe.
        ("bert", 64, device(CUDA), "bf16", "packed", "no padding"),
        # The loop costs more than little padding.
        ("bert", 32, A_CPU, "fp32", "padded", "no packed kernel"),
        ("mpnet", 64, AMPERE, "bf16", "padded", "relative position bias"),
        ("deberta-v2", 64, AMPERE, "bf16", "padded", "disentangled"),
        ("t5", 64, AMPERE, "bf16", "padded", "relative position bias"),
        ("gemma2", 64, AMPERE, "bf16", "padded", "it bounds its attention scores"),
        ("phi3", 64, AMPERE, "bf16", "padded", "packing was not verified"),
        ("bert", 64, AMPERE, "fp32", "padded", "only 16-bit"),
        ("bert", 20, AMPERE, "bf16", "padded", "have 20"),  # not a multiple of 8
        ("llama", 264, AMPERE, "bf16", "padded", "have 264"),  # more than 256
        ("bert", 64, TURING, "fp16", "padded", "a T4 has 7.5"),
        ("bert", 64, APPLE, "fp32", "padded", "mps has no packed kernel"),
    ],
)
def test_auto_packs_where_that_is_exact_and_says_why_elsewhere(
    model_type: str, head_dim: int, where: Device, precision: str, expected: str, reason: str
) -> None:
    choice = choose_attention("auto", AttentionShape(model_type, head_dim, 0), where, precision)
    assert choice.value == expected
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("model_type", "where", "precision"),
    [
        ("mpnet", A_CPU, "fp32"),  # not exact anywhere
        ("gemma2", A_CPU, "fp32"),  # nowhere
        ("phi3", A_CPU, "fp32"),  # unknown anywhere
        ("bert", AMPERE, "fp32"),
        ("bert", TURING, "fp16"),
        ("bert", APPLE, "fp32"),
    ],
)
def test_packed_attention_that_was_asked_for_in_vain_is_refused_with_what_to_do(
    model_type: str, where: Device, precision: str
) -> None:
    with pytest.raises(ModelError, match=r"because .*; use padded or auto\.$"):
        choose_attention("packed", AttentionShape(model_type, 64, 0), where, precision)


def test_a_wish_that_can_be_met_is_followed() -> None:
    odd = AttentionShape("bert", 20, 0)
    assert choose_attention("packed", odd, A_CPU, "fp32").reason == "requested"  # any head size on a CPU
    assert choose_attention("padded", odd, AMPERE, "bf16").value == "padded"
    assert choose_attention("padded", AttentionShape("gemma2", 64, 0), AMPERE, "bf16").reason == "requested"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 384, "num_attention_heads": 12, "pad_token_id": 0}, (32, 0)),
        ({"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128, "pad_token_id": None}, (128, 0)),
        ({"hidden_size": 768, "num_attention_heads": 12, "head_dim": None, "pad_token_id": 1}, (64, 1)),
    ],
)
def test_the_head_size_is_read_or_worked_out(config: dict[str, int], expected: tuple[int, int]) -> None:
    shape = read_attention_shape(SimpleNamespace(model_type="qwen3", **config))
    assert (shape.head_dim, shape.padding_id) == expected
