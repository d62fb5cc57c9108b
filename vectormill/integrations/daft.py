"""Encode a column of a Daft dataframe: `df.with_column("embedding", embed(col("text")))`.

Daft decides how many processes there are, and on a cluster of Ray on which machines; each has one encoder on one
device.
"""

from typing import Any, Final, Unpack

from vectormill.domain.encoding import DEFAULT_MODEL, OptionArguments
from vectormill.extras import require
from vectormill.integrations import make_arrow_column, warn_of_failures

# The most texts in one call of an encoder. While the last texts of a call are encoded, some cores wait.
BATCH_SIZE: Final = 4096


def embed(
    column: Any,
    model: str = DEFAULT_MODEL,
    *,
    concurrency: int = 1,
    cpus: int | None = None,
    gpus: float = 0,
    batch_size: int = BATCH_SIZE,
    errors: bool = False,
    **options: Unpack[OptionArguments],
) -> Any:
    """Return an expression with the vectors of an expression of texts, of Daft's type embedding.

    A text that cannot be encoded has no vector: null, and a warning is logged. With `errors`, the expression is a
    struct of `embedding` and `error`, which says why. `options` are those of EncodingOptions. Binary vectors are
    packed bits, as uint8.

    `concurrency` is the number of processes, each with an encoder of its own. With `gpus` each uses a GPU;
    otherwise each uses `cpus` cores, or all cores of its machine if that is None. The model's small files are read
    where this is called, because the type needs the length of a vector. Raises UnknownModel, InvalidOption,
    ModelError, and ConfigurationError if a package is missing.
    """
    require("daft", "tokenizers", extra="daft")
    import daft
    import numpy as np

    from vectormill.models.registry import EncodingOptions, make_spec, open_registry
    from vectormill.settings import load_settings

    spec = make_spec(open_registry(load_settings(), model).card(model), EncodingOptions(**options))
    kind = spec.delivered_type
    element = np.dtype(kind.row).name  # Daft names its types as numpy does
    vector_type = daft.DataType.embedding(getattr(daft.DataType, element)(), kind.width(spec.dimensions))
    row_type = daft.DataType.struct({"embedding": vector_type, "error": daft.DataType.string()})
    return_type = row_type if errors else vector_type

    # Daft makes an instance where the texts are, in a process of its own, and calls it with batches of them.
    class Embedder:
        def __init__(self) -> None:
            from worker.local import LocalEncoder

            device = "auto" if gpus else "cpu"
            self._encoder = LocalEncoder(model, device=device, num_cores=cpus, **options)

        @daft.method.batch(return_dtype=return_type, batch_size=batch_size)  # type: ignore[untyped-decorator]
        def encode(self, texts: Any) -> Any:
            import pyarrow as pa

            encoded = self._encoder.encode(texts.to_pylist())
            reasons = encoded.reasons()
            vectors = make_arrow_column(encoded)
            if errors:
                rows = pa.StructArray.from_arrays(
                    [vectors, pa.array(reasons, pa.string())], ["embedding", "error"]
                )
                return daft.Series.from_arrow(rows, texts.name()).cast(return_type)
            warn_of_failures(reasons)
            return daft.Series.from_arrow(vectors, texts.name()).cast(return_type)

    embedder: Any = daft.cls(
        Embedder, max_concurrency=concurrency, cpus=cpus, gpus=gpus, use_process=True, name_override="embed"
    )
    return embedder().encode(column)
