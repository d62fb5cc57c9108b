"""Encode a column of a Ray dataset: `dataset.map_batches(Encoder, …)`.

Ray decides how many actors there are and on which machines; each has one encoder on one device.
"""

import math
from collections.abc import Mapping
from typing import Any, Unpack

from vectormill.domain.encoding import DEFAULT_MODEL, OptionArguments
from vectormill.extras import require
from vectormill.integrations import make_arrow_column, warn_of_failures


class ColumnEncoder:
    """A callable class for `map_batches` that adds the vectors of a column of texts to each batch.

    The batch may have any of Ray's formats: a dict of numpy arrays, a pandas DataFrame, or a pyarrow Table. The
    column `output` gets a vector for each text, in place of a column of this name. A text that is null, NaN or cannot
    be encoded has null in a Table, and in the other formats NaN, or zeros for `vector_type` int8 and binary. The column
    `errors` says why a text has no vector, and is empty for the others; None leaves it out. `options` are those of
    EncodingOptions.

    The encoder uses what Ray has reserved for the actor: the GPU with `num_gpus=1`, or else `num_cpus` cores of the
    CPU. Raises what LocalEncoder raises, in the actor.
    """

    def __init__(
        self,
        column: str = "text",
        output: str = "embedding",
        model: str = DEFAULT_MODEL,
        errors: str | None = "embedding_error",
        **options: Unpack[OptionArguments],
    ) -> None:
        require("ray", "tokenizers", extra="ray")

        from worker.local import LocalEncoder

        device, num_cores = choose_share(find_reserved())
        self._column, self._output, self._errors = column, output, errors
        self._encoder = LocalEncoder(model, device=device, num_cores=num_cores, **options)

    def __call__(self, batch: Any) -> Any:
        """Return the batch with the columns that were added or replaced, in the format that it came in."""
        import numpy as np
        import pyarrow as pa

        values = batch[self._column]
        encoded = self._encoder.encode(values.to_pylist() if hasattr(values, "to_pylist") else list(values))
        told = [reason or "" for reason in encoded.reasons()]
        if self._errors is None:
            warn_of_failures(encoded.reasons())
        columns: dict[str, Any] = {self._output: make_arrow_column(encoded)}
        arrays: dict[str, Any] = {self._output: encoded.vectors}
        if self._errors is not None:
            columns[self._errors] = pa.array(told, pa.string())
            arrays[self._errors] = np.array(told, dtype=object if told else np.str_)
        if isinstance(batch, Mapping):
            return {**batch, **arrays}
        if hasattr(batch, "append_column"):
            kept = batch.drop_columns([name for name in columns if name in batch.column_names])
            for name, column in columns.items():
                kept = kept.append_column(name, column)
            return kept
        if told:
            return batch.assign(**arrays | {self._output: list(encoded.vectors)})

        import pandas as pd

        # Without rows the columns of pandas have no type, and those of Arrow have.
        return batch.assign(
            **{name: pd.Series(pd.arrays.ArrowExtensionArray(each)) for name, each in columns.items()}
        )


# The name under which Ray programs import it; `worker` has an Encoder too.
Encoder = ColumnEncoder


def find_reserved() -> Mapping[str, float]:
    """Return what Ray has reserved for this actor, by name; nothing outside an actor."""
    import ray

    if not ray.is_initialized():
        return {}
    reserved: Mapping[str, float] = ray.get_runtime_context().get_assigned_resources()
    return reserved


def choose_share(reserved: Mapping[str, float]) -> tuple[str, int | None]:
    """Return the device, and on a CPU the number of cores, that an actor with these resources may use.

    Ray makes only the actor's own GPUs visible to it, but all of them to an actor without any.
    """
    if not reserved or reserved.get("GPU"):
        return "auto", None
    return "cpu", math.ceil(reserved.get("CPU", 0)) or None
