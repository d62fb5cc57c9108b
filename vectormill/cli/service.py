"""Commands that show the live workers, with the state of the schedules."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from vectormill.cli.command import Client, command, top
from vectormill.cli.printing import listing, print_json, tell
from vectormill.cli.schedules import summarize_schedule
from vectormill.workers.samples import list_device_uses

CHOICES: Final = ("device", "backend", "precision", "way")

Worker = Mapping[str, Any]


def describe_choice(report: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return a choice in a worker's report and its reason.

    A worker that is still loading its model has made no choice yet.
    """
    choice = report.get(name) or {}
    if not isinstance(choice, Mapping):
        return str(choice), ""
    return str(choice.get("value", "not known yet")), str(choice.get("reason", ""))


def explain_choice(report: Mapping[str, Any], name: str) -> str:
    value, reason = describe_choice(report, name)
    return f"{value} ({reason})" if reason else value


def describe_plan(report: Mapping[str, Any]) -> str:
    """Return the strategy and the layers of each stage; a dash for a worker that is loading its model."""
    placement = report.get("placement")
    if not placement:
        return "-"
    stages = " | ".join(
        f"{stage['first_layer']}-{stage['first_layer'] + stage['num_layers'] - 1}"
        for stage in placement["stages"]
    )
    num_shards = max(len(stage["shards"]) for stage in placement["stages"])
    cut = f", each split over {num_shards} devices" if num_shards > 1 else ""
    return f"{placement['strategy'].replace('_', ' ')}: layers {stages}{cut}"


def describe_ways(report: Mapping[str, Any]) -> str:
    """Return what was measured of each way to run the model; a dash if nothing was."""
    told = []
    for found in report.get("ways") or ():
        rates = ", ".join(f"{rate:,} at {length}" for length, rate in found["tokens_per_second"].items())
        told.append(f"{found['way']}: {found['flaw'] or f'{rates} tokens a text'}")
    return "; ".join(told) or "-"


@command(
    top,
    "vectormill workers",
    view=listing(
        "name",
        "model",
        ("state", lambda worker: worker["report"].get("state")),
        *((name, lambda worker, name=name: explain_choice(worker["report"], name)) for name in CHOICES),
        ("ways", lambda worker: describe_ways(worker["report"])),
        ("plan", lambda worker: describe_plan(worker["report"])),
    ),
)
def workers(client: Client) -> Sequence[Worker]:
    """List the live workers with their devices, and the reasons for their settings."""
    return client.workers()


def show_workers_and_schedules(client: Client, *, is_json: bool) -> None:
    """Print the live workers and the state of the schedules."""
    workers = client.workers()
    if is_json:
        for worker in workers:
            print_json(worker)
        return
    schedules = list(client.schedules())
    if not workers:
        tell("No worker is running. Start one with `vectormill worker`, or everything with `vectormill up`.")
    print_workers(map(summarize_worker, workers))
    for lost in dict.fromkeys(
        line for worker in workers for line in worker["report"].get("lost_devices", ())
    ):
        tell(lost)
    for schedule in schedules:
        tell(summarize_schedule(schedule))


# The columns of the table of workers besides their names and models.
REPORT_COLUMNS: Final = (
    "state", "device", "plan", "loaded", "tokens/s", "padding", "memory", "in use", "bottleneck",
)  # fmt: skip
print_workers: Final = listing("name", "model", *REPORT_COLUMNS)


def summarize_worker(worker: Worker) -> dict[str, str]:
    """Return a worker's figures, keyed by column title; a dash means that the worker does not report a value."""
    report = worker["report"]

    def figure(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    loaded = "-"
    if loadings := report.get("loadings"):  # of all processes of the replica, which load at the same time
        num_bytes = sum(loading["num_bytes"] for loading in loadings)
        loaded = f"{num_bytes / 1e9:.2f} GB in {max(loading['seconds'] for loading in loadings):.1f} s"
    uses = list_device_uses(report)  # of each device that shares the model
    memory = [
        f"{use['memory_used_bytes'] / (1 << 30):.1f} of {use['memory_total_bytes'] / (1 << 30):.0f}"
        for use in uses
        if use["memory_used_bytes"] is not None and use["memory_total_bytes"]
    ]
    return {
        "name": worker["name"],
        "model": worker["model"],
        "state": str(report.get("state", "-")),
        "device": describe_choice(report, "device")[0],
        "plan": describe_plan(report),
        "loaded": loaded,
        "tokens/s": figure(report.get("tokens_per_second"), "{:,.0f}"),
        "padding": figure(report.get("padding_waste"), "{:.1%}"),
        "memory": f"{', '.join(memory)} GiB" if memory else "-",
        "in use": ", ".join(figure(use["utilisation"], "{:.0%}") for use in uses),
        "bottleneck": str((report.get("bound_by") or {}).get("value", "-")),
    }
