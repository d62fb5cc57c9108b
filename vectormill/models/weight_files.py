"""Weight files: which files of a model's directory hold its weights, and what they tell without being read whole.

Knows nothing of torch, nor of what the weights are for.
"""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.models.weight_headers import read_header, read_header_bytes

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
    """Sixteen hex digits of the model's content, the same on every machine: neither paths nor dates go in.

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
