"""Encode a column of a Ray dataset: `dataset.map_batches(Encoder, …)`.

Ray decides how many actors there are and on which machines; each has one encoder on one device.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from vectormill.domain.encoding import DEFAULT_MODEL, OptionArguments
from vectormill.extras import require
from vectormill.integrations import warn_of_failures

if TYPE_CHECKING:
    from worker.local import EncodedVectors


class ColumnEncoder:
    """A callable class for `map_batches` that adds the vectors of a column of texts to each batch.

    The batch may have any of Ray's formats: a dict of numpy arrays, a pandas DataFrame, or a pyarrow Table. The
    column `output` gets a vector for each text; for a text without one the row is NaN, or zeros for `vector_type`
    int8 and binary. The column `errors` says why a text has no vector, and is empty for the others; None leaves it
    out. `options` are those of EncodingOptions.

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
        """Return the batch with the columns that were added, in the format that it came in."""
        if isinstance(batch, Mapping):
            encoded = self._encoder.encode(list(batch[self._column]))
            return {**batch, **self._columns(encoded)}
        if hasattr(batch, "append_column"):
            return self._extend_table(batch)
        texts = batch[self._column]
        encoded = self._encoder.encode(texts.astype(object).where(texts.notna(), None).tolist())
        columns = self._columns(encoded)
        return batch.assign(**columns | {self._output: list(columns[self._output])})

    def _columns(self, encoded: "EncodedVectors") -> dict[str, Any]:
        """Return the new columns by name, as numpy arrays: [n, width] and [n]."""
        import numpy as np

        columns: dict[str, Any] = {self._output: encoded.vectors}
        reasons = encoded.reasons()
        if self._errors is not None:
            columns[self._errors] = np.array([reason or "" for reason in reasons], dtype=object)
        else:
            warn_of_failures(reasons)
        return columns

    def _extend_table(self, table: Any) -> Any:
        import pyarrow as pa

        encoded = self._encoder.encode(table.column(self._column).to_pylist())
        for name, values in self._columns(encoded).items():
            if values.ndim == 1:
                array = pa.array(values, pa.string())
            else:
                array = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
            table = table.append_column(name, array)
        return table


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
