"""The files of a model by their names: its weights, and the small ones. Reads none of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vectormill.domain.errors import ModelError, UnsupportedModel

SAFETENSORS: Final = ".safetensors"
PICKLED_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5")
# The names of torch's pickles, of which only tensors are read; a large model has several.
TORCH_WEIGHTS: Final = "pytorch_model*.bin"
# The linear layers that bge-m3 has beside its weights, in files of either kind (vectormill.models.heads).
SPARSE_LINEAR: Final = "sparse_linear"
COLBERT_LINEAR: Final = "colbert_linear"
HEAD_FILES: Final = tuple(
    f"{stem}{suffix}" for stem in (SPARSE_LINEAR, COLBERT_LINEAR) for suffix in (".pt", SAFETENSORS)
)
ADAPTER_CONFIG: Final = "adapter_config.json"
# The settings of Stanford's ColBERT.
ARTIFACT: Final = "artifact.metadata"


def find_weights(directory: Path, name: str) -> list[Path]:
    """Return the files of the transformer's own weights, sorted by name. Raise ModelError if there are none.

    Only pickles written by torch are read, and only their tensors.
    """
    files = list_weights(directory)
    if files:
        return files
    pickles = sorted(path.name for pattern in PICKLED_WEIGHTS for path in directory.glob(pattern))
    if pickles:
        raise UnsupportedModel(
            f"The model {name!r} has its weights only in {pickles[0]}, which is not read because it may run any code. "
            "Convert it once where you trust it: AutoModel.from_pretrained(…).save_pretrained(…) of transformers "
            "writes safetensors."
        )
    raise ModelError(f"The model {name!r} has no weights: {directory} contains no *.safetensors file.")


def list_weights(directory: Path) -> list[Path]:
    """Return the safetensors files sorted by name, or else torch's; empty if there are none."""
    whole = [path for path in sorted(directory.glob("*.safetensors")) if path.name not in HEAD_FILES]
    return whole or sorted(directory.glob(TORCH_WEIGHTS))


def list_small_files(directory: Path) -> list[Path]:
    """Return the files besides weights that a model's results depend on."""
    vocabulary = [] if (directory / "tokenizer.json").is_file() else sorted(directory.glob("vocab.txt"))
    # The folder in which sentence-transformers keeps a table of static embeddings with its tokenizer.
    vocabulary += sorted(directory.glob("*_StaticEmbedding/tokenizer.json"))
    small = [*sorted(directory.glob("*.json")), *sorted(directory.glob("*/config.json")), *vocabulary]
    small += [*sorted(directory.glob("*.jinja")), *sorted(directory.glob(f"*/{ADAPTER_CONFIG}"))]
    return [*small, *sorted(directory.glob(ARTIFACT))]


def list_weight_files(directory: Path, weights: Sequence[Path]) -> list[Path]:
    """Return the transformer's own weights, which are given, and those of its modules and heads."""
    inner = sorted(directory.glob("*/*.safetensors"))
    folders = {path.parent for path in inner}
    inner += [path for path in sorted(directory.glob(f"*/{TORCH_WEIGHTS}")) if path.parent not in folders]
    heads = [directory / name for name in HEAD_FILES if (directory / name).is_file()]
    return [*weights, *inner, *heads]
