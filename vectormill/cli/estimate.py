"""The command estimate, which computes before anything is started what a job and its collection will take."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import typer

from vectormill.cli.collections import describe_bytes
from vectormill.cli.command import command
from vectormill.cli.printing import print_facts, tell

app = typer.Typer()

# Seconds of one core for a row of 384 dimensions in an HNSW index that fits into memory: 1.7 ms for the first 20,000
# rows with ef_construction = 64 (docs/INDEXES.md), more with the size of the graph and with ef_construction = 128.
LEAST_BUILD_SECONDS: Final = 0.001
MOST_BUILD_SECONDS: Final = 0.006
# Bytes of a token in UTF-8, and how much of them Postgres keeps of a job's texts after compression.
TEXT_BYTES_PER_TOKEN: Final = 4.5
KEPT_SHARE: Final = 0.5
MEASURED_SHARE: Final = 0.15
BITS: Final = {"float32": 32, "float16": 16, "int8": 16, "binary": 1}


def show_estimate(told: Mapping[str, Any]) -> None:
    from vectormill.client.views import describe_seconds

    least, most = told["seconds"]
    build = told["index"]
    print_facts(
        [
            ("tokens", f"{told['tokens']:,.0f}"),
            ("tokens/s", " to ".join(f"{rate:,.0f}" for rate in told["tokens_per_second"])),
            *told["reasons"].items(),
            ("encoding", f"{describe_seconds(least)} to {describe_seconds(most)}"),
            ("price", told["price"] and " to ".join(f"{price:,.2f}" for price in told["price"])),
            ("rows", describe_bytes(told["rows_bytes"])),
            ("texts of the job", describe_bytes(told["texts_bytes"])),
            ("index", describe_bytes(build["bytes"]) if build["bytes"] else build["reason"]),
            ("its build", build["bytes"] and " to ".join(map(describe_seconds, build["seconds"]))),
        ]
    )
    if build["bytes"]:
        tell(
            "The build needs the index's size as maintenance_work_mem, and in a container as shared memory; on disk it "
            "takes many times longer."
        )


@command(
    app,
    "vectormill estimate --rows 5e6 --tokens 256 --devices 2x80GiB@sm_90,16cores,128GiB",
    "vectormill estimate --rows 2e6 --tokens 120 --model bge-m3 --tokens-per-second 40000 --price 2.5",
    note="The interval is wide, because only the arithmetic of the model and the devices is known. "
    "For a narrow one, encode a sample and give the rate that `vectormill status JOB` shows.",
    view=show_estimate,
)
def estimate(
    *,
    rows: float,
    tokens: float,
    model: str = "all-MiniLM-L6-v2",
    devices: str = "auto",
    precision: str = "auto",
    vector_type: Literal["float32", "float16", "int8", "binary"] = "float16",
    dimensions: int | None = None,
    tokens_per_second: float | None = None,
    price: float | None = None,
    cores: int = 4,
) -> Mapping[str, Any]:
    """Estimate the hours of a job, the disk of its collection, and the memory and time of the index.

    Args:
        rows (N): The number of rows, such as 5e6.
        tokens (N): The mean number of tokens of a row. Longer texts than the model's window count as the window.
        model (NAME): A registered model, a directory with a config.json, or OWNER/NAME on the Hugging Face hub.
        devices (DEVICES): auto for this machine, or a description such as 2x80GiB@sm_90,16cores,128GiB.
        precision: The precision of the weights: auto, fp32, fp16, bf16 or int8.
        vector_type: The type of a vector's numbers in the collection.
        dimensions (N, from 1): Keep only the first N values of a vector.
        tokens_per_second (N): The measured rate of all devices together, instead of an estimated one.
        price (MONEY): The price of the machine for an hour, in any currency.
        cores (N, from 1): The cores of the Postgres server that build the index.
    """
    from vectormill.collections.index_plan import SHAPES, estimate_graph_bytes, find_operator_class
    from vectormill.collections.sizing import estimate_row_bytes
    from vectormill.domain.errors import InvalidOption
    from vectormill.models.registry import Registry
    from vectormill.settings import load_settings

    if min(rows, tokens, tokens_per_second or 1) < 1:
        raise InvalidOption("--rows, --tokens and --tokens-per-second must be at least 1.")
    card = Registry(load_settings().models).outline(model)
    num_rows, num_dimensions = round(rows), dimensions or card.dimension
    num_tokens = num_rows * min(tokens, card.max_tokens)
    if tokens_per_second is None:
        least, most, reasons = estimate_rate(card, devices, precision)
    else:
        least, most = (tokens_per_second * (1 + sign * MEASURED_SHARE) for sign in (-1, 1))
        reasons = {}
    seconds = (num_tokens / most, num_tokens / least)
    _, m, _ = max(shape for shape in SHAPES if shape[0] <= num_rows)
    kind, reason = find_operator_class(vector_type, num_dimensions)
    graph = kind and estimate_graph_bytes(num_rows, kind.vector_bytes(num_dimensions), m)
    scale = num_rows * (num_dimensions / 384) / cores
    return {
        "rows": num_rows,
        "tokens": num_tokens,
        "tokens_per_second": [least, most],
        "reasons": reasons,
        "seconds": list(seconds),
        "price": [price * each / 3600 for each in seconds] if price else None,
        "rows_bytes": num_rows * estimate_row_bytes(num_dimensions * BITS[vector_type] // 8),
        "texts_bytes": round(num_rows * tokens * TEXT_BYTES_PER_TOKEN * KEPT_SHARE),
        "index": {
            "bytes": graph,
            "reason": reason,
            "seconds": [scale * LEAST_BUILD_SECONDS, scale * MOST_BUILD_SECONDS],
        },
    }


def estimate_rate(card: Any, devices: str, precision: str) -> tuple[float, float, Mapping[str, str]]:
    from worker.devices.described import describe_inventory, is_description
    from worker.devices.detect import detect_inventory
    from worker.estimate import estimate_rate
    from worker.settings import load_worker_settings

    inventory = describe_inventory(devices) if is_description(devices) else detect_inventory()
    named = "auto" if is_description(devices) else devices
    return estimate_rate(card, inventory, load_worker_settings(devices=named, precision=precision))
