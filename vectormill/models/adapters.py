"""Read what an adapter of a model's directory is, of which one is merged into the weights. Imports no torch.

An adapter is a folder in the layout of peft with the two small matrices for each layer that LoRA adds to a
weight (https://arxiv.org/abs/2106.09685). jinaai/jina-embeddings-v3-hf has one for each task.
"""

import math
from typing import Final

from vectormill.domain.errors import UnsupportedModel
from vectormill.models.model_card import Adapter
from vectormill.models.model_files import ModelFiles
from vectormill.models.weights import ADAPTER_CONFIG

# Settings of peft that change more than a product of two matrices; each is unset in a plain adapter.
_UNSUPPORTED: Final = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)


def read_adapter(files: ModelFiles, wanted: str) -> Adapter:
    """Return the adapter in a folder. Raise UnsupportedModel if there is none or if it is more than LoRA."""
    name = files.name
    known = sorted(path.parent.name for path in files.directory.glob(f"*/{ADAPTER_CONFIG}"))
    if wanted not in known:
        raise UnsupportedModel(
            f"The model {name!r} has no adapter {wanted!r}; "
            f"{'it has ' + ', '.join(known) if known else 'no folder in its directory is one'}."
        )
    config = files.read(f"{wanted}/{ADAPTER_CONFIG}")
    flaws = [key for key in _UNSUPPORTED if config.find(key)]
    if config.take("peft_type", "") != "LORA" or config.take("bias", "none") != "none" or flaws:
        raise UnsupportedModel(
            f"The adapter {wanted!r} of model {name!r} is not a plain LoRA"
            f"{' (' + ', '.join(flaws) + ')' if flaws else ''}, which is the only kind that is merged."
        )
    rank = config.count("r")
    alpha = float(config.take("lora_alpha", 0.0))
    return Adapter(wanted, alpha / (math.sqrt(rank) if config.take("use_rslora", False) else rank))
