"""Which switches an encoder takes, and why, and what their table comes to."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from vectormill.domain.errors import ConfigurationError, ModelError
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.device import Device
from worker.encoder import switches
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import EncoderOrder
from worker.encoder.switches import (
    C_COMPILER,
    SWITCHES,
    Switch,
    SwitchChoice,
    choose_switches,
    is_installed,
    list_tried,
    parse_switches,
)
from worker.encoder.way import Way
from worker.settings import load_worker_settings

PROCESSOR = Device("cpu:0", "cpu", 0, (), 1, 1 << 30, frozenset({"avx512f"}))
HOPPER = Device("cuda:0", "cuda", 0, (), 1, 80 << 30, frozenset({"sm_90"}), "an H100")
ADA = replace(HOPPER, features=frozenset({"sm_89"}), description="an L40")
TURING = replace(HOPPER, features=frozenset({"sm_75"}), description="a T4")
BLACKWELL = replace(HOPPER, features=frozenset({"sm_100"}), description="a B200")
PADDED = "the precision is fp32"

TABLE = {
    switch.name: switch
    for switch in (
        Switch("plain", "Anywhere."),
        Switch("new", "On new cards.", smallest_capability=89, changes_vectors=True),
        Switch("hopper", "On one card.", smallest_capability=90, largest_capability=90, package="flash3"),
        Switch("built", "Of code that is compiled.", needs_compiler=True),
    )
}
WAY = Way("torch", ("plain", "new", "hopper"), "measured here on 2026-11-30")


@pytest.fixture
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kind of need, instead of the real one."""
    monkeypatch.setattr(switches, "SWITCHES", TABLE)


WITH_SMALL_TABLE = pytest.mark.usefixtures("small_table")


def choose(
    wanted: str,
    device: Device = HOPPER,
    *,
    installed: bool = True,
    padded_because: str = "",
    way: Way | None = WAY,
) -> Mapping[str, SwitchChoice]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(switches, "is_installed", lambda _: installed)
        return {choice.name: choice for choice in choose_switches(wanted, device, padded_because, way)}


@WITH_SMALL_TABLE
def test_none_takes_none_and_auto_what_was_measured() -> None:
    assert choose("none") == {}
    chosen = choose("auto")
    assert list(chosen) == ["plain", "new", "hopper"]
    assert all(choice.is_on and choice.reason == WAY.reason for choice in chosen.values())
    assert choose("auto", way=None) == {}, "nothing was measured there"


@WITH_SMALL_TABLE
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("hopper", ["hopper"]),
        (" hopper , plain", ["plain", "hopper"]),  # in the table's order, whatever the user's
        ("plain,plain", ["plain"]),
    ],
)
def test_named_switches_are_taken_where_they_can_be(names: str, expected: list[str]) -> None:
    chosen = choose(names)
    assert [name for name, choice in chosen.items() if choice.is_on] == expected == list(chosen)
    assert {choice.reason for choice in chosen.values()} == {"requested"}


@WITH_SMALL_TABLE
@pytest.mark.parametrize(
    ("name", "device", "options", "reason"),
    [
        ("new", TURING, {}, "it needs compute capability 8.9 or higher, and a T4 has 7.5"),
        ("new", PROCESSOR, {}, "it needs a GPU with compute capability 8.9 or higher, and cpu:0 is not one"),
        ("hopper", BLACKWELL, {}, "it needs compute capability 9.0, and a B200 has 10.0"),
        ("hopper", HOPPER, {"installed": False}, "the package flash3 is not installed"),
        ("built", HOPPER, {"installed": False}, "it needs a C compiler, and none is installed"),
        (
            "plain",
            HOPPER,
            {"padded_because": PADDED},
            f"it needs packed attention, and batches are padded: {PADDED}",
        ),
    ],
)
def test_what_cannot_be_is_an_error_where_it_was_asked_for_and_off_with_its_reason_by_auto(
    name: str, device: Device, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(
        ModelError, match="remove it from VECTORMILL_WORKER_SWITCHES, or set that to auto or none"
    ) as error:
        choose(name, device, **options)  # type: ignore[arg-type]
    assert f"The switch {name} cannot be used because {reason};" in str(error.value)
    (choice,) = choose("auto", device, way=Way("torch", (name,)), **options).values()  # type: ignore[arg-type]
    assert (choice.is_on, choice.note) == (False, f"The switch {name} is off because {reason}.")


@WITH_SMALL_TABLE
def test_what_changes_vectors_is_tried_only_where_it_is_named_beside_auto() -> None:
    assert list_tried("auto") == ("plain", "hopper", "built")
    assert list_tried("auto, new") == ("plain", "new", "hopper", "built")
    assert list_tried("new") == list_tried("none") == ()
    assert parse_switches("auto, new") is None
    assert choose("auto,new") == choose("auto"), "those that were measured, whatever is tried"
    with pytest.raises(ConfigurationError, match=r"The switch plain stands beside auto"):
        parse_switches("auto,plain")


def test_a_module_inside_a_broken_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_flash" / "cute").mkdir(parents=True)
    (tmp_path / "broken_flash" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    (tmp_path / "broken_flash" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("broken_flash.cute")
    assert not is_installed("broken_flash.other")
    assert not is_installed("no_such_package.cute")


def test_a_compiler_is_found_by_the_names_that_the_compilers_look_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not is_installed(C_COMPILER)
    for name in ("clang", "gcc"):
        (tmp_path / name).touch(mode=0o755)
        assert is_installed(C_COMPILER)
        (tmp_path / name).unlink()
    assert is_installed("torch")
    assert not is_installed("no_such_package")
    assert not is_installed("no_such_package.part")


@pytest.mark.parametrize(
    ("names", "told", "left"),
    [
        ("packed_ranks", "packed_ranks", ()),
        ("packed_ranks,queued_ranks", "packed_ranks and queued_ranks", ()),
        ("direct_flash,fused_qkv,compile", "direct_flash and fused_qkv", ("compile",)),
    ],
)
def test_a_switch_that_is_needed_no_more_stops_no_worker_and_is_told(
    names: str, told: str, left: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert parse_switches(load_worker_settings(switches=names).switches) == left
    (message,) = caplog.messages
    assert message.startswith(
        f"VECTORMILL_WORKER_SWITCHES names {told}, which is no switch any more: it is on"
    )


def test_an_unknown_switch_is_refused_at_the_start_with_the_nearest_right_one() -> None:
    for name in SWITCHES:
        assert load_worker_settings(switches=name).switches == name
        assert parse_switches(name) == (name,)
    assert load_worker_settings().switches == "auto"
    for wrong, right in (("comple", "compile"), ("nine", "none"), ("compile,", "auto")):
        with pytest.raises(
            ConfigurationError, match=r"--switches: .*Unknown switch .*; did you mean"
        ) as error:
            load_worker_settings(switches=wrong)
        assert right in str(error.value)


def test_a_backend_that_has_no_switches_refuses_them_by_name(tmp_path: Path) -> None:
    order = EncoderOrder(
        Registry({}).card(DEFAULT_MODEL), PROCESSOR, "openvino", "fp32", 1, tmp_path, switches="compile"
    )
    with pytest.raises(ModelError, match="openvino does not support packed attention"):
        load_encoder(order)
