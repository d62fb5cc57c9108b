"""Encode a column of a Spark dataframe: `df.withColumn("embedding", embed("text"))`.

Spark decides how many Python workers there are; each makes one encoder and keeps it for all its tasks.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Unpack

from vectormill.domain.encoding import DEFAULT_MODEL, OptionArguments
from vectormill.domain.errors import InvalidOption
from vectormill.domain.vector_type import DEFAULT_TYPE, VECTOR_TYPES
from vectormill.extras import require
from vectormill.integrations import warn_of_failures

if TYPE_CHECKING:
    from worker.local import LocalEncoder

# The encoders of this Python worker, by model, options, device and cores.
_encoders: "dict[tuple[Any, ...], LocalEncoder]" = {}


def embed(
    column: Any, model: str = DEFAULT_MODEL, *, errors: bool = False, **options: Unpack[OptionArguments]
) -> Any:
    """Return a column with the vectors of a column of texts, as array<float>.

    A text that cannot be encoded has no vector: null, and a warning is logged. With `errors`, the column is a
    struct of `embedding` and `error`, which says why. `options` are those of EncodingOptions. float16 vectors come
    as array<float>, int8 ones as array<tinyint>, and binary ones, packed bits, as binary.

    A task uses what Spark has assigned to it: its first GPU (`spark.task.resource.gpu.amount`), or else
    `spark.task.cpus` cores. Raises InvalidOption, and ConfigurationError if a package is missing.
    """
    require("pyspark", "pandas", "pyarrow", extra="spark")

    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    vector_type = options.get("vector_type") or DEFAULT_TYPE.name
    if vector_type not in VECTOR_TYPES:
        raise InvalidOption(f"vector_type must be one of {', '.join(VECTOR_TYPES)}, not {vector_type!r}.")
    kind = VECTOR_TYPES[vector_type]
    # Spark has no float16, and tinyint is its int8.
    column_type = "array<float>" if kind.is_float else "array<tinyint>" if not kind.is_packed else "binary"

    def encode(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
        for rows, reasons in encode_batches(batches, model, options):
            warn_of_failures(reasons)
            yield pd.Series(rows, dtype=object)

    def encode_with_errors(batches: Iterator[pd.Series]) -> Iterator[pd.DataFrame]:
        for rows, reasons in encode_batches(batches, model, options):
            yield pd.DataFrame({"embedding": pd.Series(rows, dtype=object), "error": reasons})

    if errors:
        return pandas_udf(encode_with_errors, f"struct<embedding: {column_type}, error: string>")(column)
    return pandas_udf(encode, column_type)(column)


def encode_batches(
    batches: Iterator[Any], model: str, options: OptionArguments
) -> Iterator[tuple[list[Any], list[str | None]]]:
    """Encode batches of texts, each a pandas Series, on the encoder of this Python worker.

    Yield for each batch its rows, None for a text without a vector, and the reasons of those that have none.
    """
    encoder = find_encoder(model, options)
    for texts in batches:
        encoded = encoder.encode(texts.tolist())
        rows: list[Any] = list(encoded.vectors)
        if encoder.spec.delivered_type.is_packed:
            rows = [row.tobytes() for row in rows]
        for place in encoded.failures:
            rows[place] = None
        yield rows, encoded.reasons()


def find_encoder(model: str, options: OptionArguments) -> "LocalEncoder":
    """Return the encoder of this Python worker, and make it if there is none or if it has failed.

    Encoders on other devices are closed: Spark has given those to other tasks.
    """
    require("tokenizers", extra="spark")

    from worker.local import LocalEncoder

    device, num_cores = choose_share()
    key = (model, tuple(sorted(options.items())), device, num_cores)
    for other in [other for other in _encoders if other[2:] != key[2:] or not _encoders[other].is_healthy()]:
        _encoders.pop(other).close()
    if key not in _encoders:
        _encoders[key] = LocalEncoder(model, device=device, num_cores=num_cores, **options)
    return _encoders[key]


def choose_share() -> tuple[str, int | None]:
    """Return the device, and on a CPU the number of cores, that Spark has assigned to the running task."""
    from pyspark import TaskContext

    task = TaskContext.get()
    if task is None:
        return "auto", None
    gpu = task.resources().get("gpu")
    return (f"cuda:{gpu.addresses[0]}", None) if gpu is not None else ("cpu", task.cpus())
