"""Write the golden data of this folder with peft.

Run `PYTHONPATH=. python tests/data/adapters/make.py` in an environment with peft 0.21; the tests do not need it.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel

from tests.adapters import ADAPTER, DATA, IDS, write_adapted, write_config


def main() -> None:
    from peft import LoraConfig, get_peft_model

    targets = ["word_embeddings", "q_proj", "o_proj", "up_proj"]
    config = LoraConfig(r=2, lora_alpha=3, target_modules=targets, use_rslora=True, init_lora_weights=False)
    with tempfile.TemporaryDirectory() as folder:
        base = AutoModel.from_pretrained(write_adapted(Path(folder))).eval()
        torch.manual_seed(0)
        adapted = get_peft_model(base, config)
        adapted.save_pretrained(str(DATA / ADAPTER))
        (DATA / ADAPTER / "README.md").unlink()
        write_config(DATA, base_model_name_or_path="", target_modules=sorted(targets))
        merged = adapted.merge_and_unload()
        with torch.inference_mode():
            states = [merged(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy() for ids in IDS]
    np.savez(DATA / "states.npz", *states)


if __name__ == "__main__":
    main()
