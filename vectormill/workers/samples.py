"""Samples: a worker's speed and load over the last minutes, stored in its report and read to draw charts.

docs/decisions/0038-samples-lie-in-the-report.md says why they are not in a separate table, and what they
cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

RECENT: Final = "recent"
MIB: Final = 1 << 20
MOST_SAMPLES: Final = 60
SAMPLE_SECONDS: Final = 10.0
# Charts show no more digits, and each digit costs a byte in every report.
_DIGITS: Final = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements over some ten seconds, which ended `seconds_ago` before the report. None means unknown.

    `busy_percent` is that of the device, 0 to 100.
    """

    seconds_ago: float
    tokens_per_second: float
    memory_used_mib: int | None
    busy_percent: int | None


def write_samples(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return samples as columns of numbers, the oldest first.

    They are evenly spaced, so `seconds_ago` has only the ages of the oldest and the newest.
    """
    ends = [samples[0].seconds_ago, samples[-1].seconds_ago] if samples else []
    return {
        "seconds_ago": [round(end, 1) for end in ends],
        "tokens_per_second": [round_to_digits(sample.tokens_per_second) for sample in samples],
        "memory_used_mib": [sample.memory_used_mib for sample in samples],
        "busy_percent": [sample.busy_percent for sample in samples],
    }


def read_samples(report: Mapping[str, Any]) -> list[Sample]:
    """Return the samples in a worker's report, the oldest first; empty if the report has none."""
    written: Any = report.get(RECENT)
    try:
        rates, memory, busy = (
            written[name] for name in ("tokens_per_second", "memory_used_mib", "busy_percent")
        )
        if not rates:
            return []
        oldest, newest = (float(end) for end in written["seconds_ago"])
        step = (oldest - newest) / max(1, len(rates) - 1)
        return [
            Sample(oldest - step * number, float(rate), used, percent)
            for number, (rate, used, percent) in enumerate(zip(rates, memory, busy, strict=True))
        ]
    except (TypeError, KeyError, ValueError):  # written in another format by another release
        return []


def round_to_digits(number: float) -> int:
    """Round to three significant digits: 1,234,567 becomes 1,230,000."""
    whole = round(number)
    return round(whole, min(0, _DIGITS - len(str(abs(whole)))))


DEVICE_USE: Final = ("memory_used_bytes", "memory_total_bytes", "utilisation")


def list_device_uses(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the name, memory and utilisation of each device that a worker reports; None for what it does not know.

    Older workers report one device, or several together.
    """
    device = report.get("device")
    joint = {"name": str(device.get("value", "")) if isinstance(device, Mapping) else ""}
    return [
        {name: use.get(name) for name in ("name", *DEVICE_USE)}
        for use in report.get("devices")
        or [joint | {name: report.get(f"device_{name}") for name in DEVICE_USE}]
    ]
