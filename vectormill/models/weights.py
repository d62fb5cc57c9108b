"""The files of a model's weights, and what they say of their tensors without being read whole. Imports no torch.

Safetensors files begin with a header that says it. Of a pickle, as torch writes it, the names and shapes are
unpickled alone: what it may call is listed here, and is nothing but the making of tensors, for which sizes stand
here.
"""

import io
import json
import math
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Final

from vectormill.domain.errors import ModelError, UnsupportedModel

SAFETENSORS: Final = ".safetensors"
_METADATA: Final = "__metadata__"
# As torch calls storages, and safetensors their type.
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
    """Return the tensors of a file by name; reads a few kilobytes of it. Raise ModelError for a pickle of anything
    else.
    """
    if path.suffix != SAFETENSORS:
        return _read_pickled(path)
    header: dict[str, Any] = json.loads(read_header_bytes(path)[0])
    return {
        name: TensorHeader(entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
        if name != _METADATA
    }


def read_header_bytes(path: Path) -> tuple[bytes, int]:
    """Return the header as it is written, and where the numbers begin; of a pickle the names, and 0."""
    if path.suffix != SAFETENSORS:
        return json.dumps({name: each.shape for name, each in read_header(path).items()}).encode(), 0
    with path.open("rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        return file.read(size), 8 + size


def _read_pickled(path: Path) -> dict[str, TensorHeader]:
    try:
        tensors = _unpickle(path)
    except Exception as error:  # whatever bytes that are no pickle of tensors make of it
        raise ModelError(f"The file {path} cannot be read as a pickle of tensors alone: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(each, TensorHeader) for each in tensors.values()):
        raise ModelError(f"The file {path} does not hold a mapping of names to tensors.")
    return dict(tensors)


def _unpickle(path: Path) -> Any:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            return _SizesUnpickler(io.BytesIO(archive.read(name))).load()
    with path.open("rb") as file:  # as before torch 1.6: a magic number, a version and a system come first
        for _ in range(3):
            _SizesUnpickler(file).load()
        return _SizesUnpickler(file).load()


class _SizesUnpickler(pickle.Unpickler):
    """An unpickler that makes sizes where torch makes tensors, and calls nothing else."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _MAKERS:
            return _MAKERS[module, name]
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"it would call {module}.{name}")

    def persistent_load(self, pid: Any) -> str:
        """Return the type of ("storage", its type, its number, its device, its length)."""
        return str(pid[1])


def _make_header(storage: str, offset: int, shape: tuple[int, ...], *_: Any) -> TensorHeader:
    return TensorHeader(storage, tuple(int(size) for size in shape))


def _keep(header: TensorHeader, *_: Any) -> TensorHeader:
    return header


_MAKERS: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _make_header,
    ("torch._utils", "_rebuild_parameter"): _keep,
}


def count_parameters(weights: Sequence[Path]) -> int:
    """Return how many numbers the files hold; reads a few kilobytes of each."""
    return sum(math.prod(tensor.shape) for path in weights for tensor in read_header(path).values())


PICKLED_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5")
# A pickle by torch, of which tensors alone are read; a large model has several.
TORCH_WEIGHTS: Final = "pytorch_model*.bin"


def find_weights(directory: Path, name: str) -> list[Path]:
    """Return the files of the transformer's own weights, in order of name. Raise ModelError where there are none.

    Of pickles only those that torch writes are read, and tensors alone of them.
    """
    files = list_weights(directory)
    if files:
        return files
    pickles = sorted(path.name for pattern in PICKLED_WEIGHTS for path in directory.glob(pattern))
    if pickles:
        raise UnsupportedModel(
            f"The model {name!r} has its weights only in {pickles[0]}, which is not read: it may run any code. "
            "Convert it once where you trust it: AutoModel.from_pretrained(…).save_pretrained(…) of transformers "
            "writes safetensors."
        )
    raise ModelError(f"The model {name!r} has no weights: there is no *.safetensors file in {directory}.")


def list_weights(directory: Path) -> list[Path]:
    """Return the safetensors files in order of name, or else those of torch; perhaps none is there."""
    return sorted(directory.glob("*.safetensors")) or sorted(directory.glob(TORCH_WEIGHTS))


def fingerprint_directory(directory: Path, weights: Sequence[Path]) -> str:
    """Return sixteen hex digits of the model's content, the same on every machine: neither paths nor dates go in.

    All small files are read whole. Of the weights, the header, the size and 64 samples are enough to tell two
    fine-tuned copies of one architecture apart, without reading gigabytes.
    """
    digest = blake2b(digest_size=8)
    vocabulary = [] if (directory / "tokenizer.json").is_file() else sorted(directory.glob("vocab.txt"))
    for path in sorted(directory.glob("*.json")) + sorted(directory.glob("*/config.json")) + vocabulary:
        digest.update(path.relative_to(directory).as_posix().encode() + b"\0" + path.read_bytes())
    inner = sorted(directory.glob("*/*.safetensors"))
    folders = {path.parent for path in inner}
    inner += [path for path in sorted(directory.glob(f"*/{TORCH_WEIGHTS}")) if path.parent not in folders]
    for path in [*weights, *inner]:
        size = path.stat().st_size
        header, start = read_header_bytes(path)
        digest.update(f"{path.name}:{size}".encode() + header)
        with path.open("rb") as file:
            for sample in range(64):
                file.seek(start + (size - start) * sample // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()


def find_tensor_names(weights: Sequence[Path]) -> set[str]:
    """Return the tensor names in the headers of the files; read a few kilobytes of each."""
    return {name for path in weights for name in read_header(path)}
