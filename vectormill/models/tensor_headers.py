"""The types and shapes of the tensors in weight files, read without the weights, and a model's fingerprint.

Safetensors files begin with a header that lists the tensors. Of torch's pickles only names and shapes are
unpickled: the functions that a pickle may call are listed here, and only create tensors, for which headers
are returned. Imports no torch.
"""

import io
import json
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from vectormill.domain.errors import ModelError
from vectormill.models.weights import SAFETENSORS, list_small_files, list_weight_files

_METADATA: Final = "__metadata__"
# torch's names of storages, and safetensors' names of the types.
_STORAGES: Final = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """The type and shape of a stored tensor. `dtype` is named as in safetensors, such as F32 or BF16."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("F", "BF"))

    @property
    def value_bytes(self) -> int:
        digits = re.search(r"\d+", self.dtype)
        return max(1, int(digits[0]) // 8) if digits else 1


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Return the tensors of a file by name; reads only a few kilobytes of a safetensors file.

    Raise ModelError for a pickle of anything else.
    """
    if path.suffix != SAFETENSORS:
        return _read_pickled(path)
    try:
        header: dict[str, Any] = json.loads(read_header_bytes(path)[0])
        return {
            name: TensorHeader(str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))
            for name, entry in header.items()
            if name != _METADATA
        }
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ModelError(f"The file {path} is damaged: its header lists no tensors ({error!r}).") from error


def read_header_bytes(path: Path) -> tuple[bytes, int]:
    """Return the header as stored and the offset of the numbers.

    For a pickle these are the names and shapes as JSON, and 0.
    """
    if path.suffix != SAFETENSORS:
        return json.dumps({name: each.shape for name, each in read_header(path).items()}).encode(), 0
    with path.open("rb") as file:
        start = file.read(8)
        size = int.from_bytes(start, "little")
        if len(start) < 8 or size > path.stat().st_size:
            raise ModelError(
                f"The file {path} is damaged: its header would be longer than the file; fetch a pointer of Git LFS by "
                "`git lfs pull`."
            )
        return file.read(size), 8 + size


def _read_pickled(path: Path) -> dict[str, TensorHeader]:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
                tensors = _SizesUnpickler(io.BytesIO(archive.read(name))).load()
        else:
            with path.open("rb") as file:
                for _ in range(3):  # before torch 1.6: a magic number, a version and a system come first
                    _SizesUnpickler(file).load()
                tensors = _SizesUnpickler(file).load()
    except MemoryError:
        raise
    except Exception as error:  # bytes that are not a pickle of tensors may cause any error
        raise ModelError(f"The file {path} cannot be read as a pickle of tensors alone: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(each, TensorHeader) for each in tensors.values()):
        raise ModelError(f"The file {path} does not contain a mapping of names to tensors.")
    return dict(tensors)


class _SizesUnpickler(pickle.Unpickler):
    """An unpickler that creates headers in place of torch's tensors, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _MAKERS:
            return _MAKERS[module, name]
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"it would call {module}.{name}")

    def persistent_load(self, pid: Any) -> str:
        """Return the type of a storage, which torch pickles as (…, type, number, …); its numbers are not loaded."""
        return str(pid[1])


_MAKERS: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): lambda storage, _, shape, *__: TensorHeader(
        storage, tuple(int(size) for size in shape)
    ),
    ("torch._utils", "_rebuild_parameter"): lambda header, *_: header,
}


def fingerprint_directory(directory: Path, weights: Sequence[Path]) -> str:
    """Return sixteen hex digits that identify the model's content on any machine, without paths or dates.

    All small files are read whole. For the weights, header, size and 64 samples are enough to tell two
    fine-tuned copies of one architecture apart without reading gigabytes.
    """
    digest = blake2b(digest_size=8)
    for path in list_small_files(directory):
        digest.update(path.relative_to(directory).as_posix().encode() + b"\0" + path.read_bytes())
    for path in list_weight_files(directory, weights):
        size = path.stat().st_size
        header, start = read_header_bytes(path)
        digest.update(f"{path.name}:{size}".encode() + header)
        with path.open("rb") as file:
            for sample in range(64):
                file.seek(start + (size - start) * sample // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()
