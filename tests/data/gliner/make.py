"""Write two tiny models of random weights with the package gliner, and what it makes of some texts.

Run it in an environment with gliner 0.2.29: `python make.py`. Tests do not run it.
"""

# mypy: ignore-errors

import json
import shutil
from pathlib import Path

import torch
from gliner import GLiNER
from gliner.config import UniEncoderSpanConfig
from gliner.model import UniEncoderSpanGLiNER
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
TEXTS = [
    "Ada Lovelace met Charles Babbage in London.",
    "well-known words, 漢字 and e-mail_addresses: a@b.c!",
    "a",
    "Tests do not run it, and the package has few words to learn from, so it splits them.",
]
SEEDS = (12, 7)  # with which some of the labels are found, and not all
LABELS = ["company", "person", "place of birth"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def train(model, trainer, pre_tokenizer, first: str, last: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizer
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines() * 3 + TEXTS, trainer)
    ids = [(name, tokenizer.token_to_id(name)) for name in (first, last)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A {last}", special_tokens=ids)
    names = {"cls_token": first, "sep_token": last, "unk_token": "[UNK]", "pad_token": "[PAD]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names)


SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]


def make_deberta() -> tuple[PreTrainedTokenizerFast, UniEncoderSpanConfig]:
    """As GLiNER v2.1: DeBERTa v3, a projection to a smaller width, and an LSTM."""
    tokenizer = train(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=150, special_tokens=SPECIAL, unk_token="[UNK]", show_progress=False
        ),
        pre_tokenizers.Metaspace(),
        "[CLS]",
        "[SEP]",
    )
    encoder = {
        "model_type": "deberta-v2",
        **SIZES,
        "relative_attention": True,
        "position_buckets": 16,
        "max_relative_positions": -1,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "type_vocab_size": 0,
        "pad_token_id": 0,
    }
    return tokenizer, UniEncoderSpanConfig(encoder_config=encoder, hidden_size=16, max_width=4, max_len=24)


def make_bert() -> tuple[PreTrainedTokenizerFast, UniEncoderSpanConfig]:
    """Without projection and LSTM; a label is represented by its first own token."""
    tokenizer = train(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False),
        pre_tokenizers.BertPreTokenizer(),
        "[CLS]",
        "[SEP]",
    )
    encoder = {"model_type": "bert", **SIZES, "max_position_embeddings": 128}
    return tokenizer, UniEncoderSpanConfig(
        encoder_config=encoder,
        hidden_size=32,
        max_width=3,
        max_len=24,
        num_rnn_layers=0,
        embed_ent_token=False,
    )


def main() -> None:
    golden = {"texts": TEXTS, "labels": LABELS, "models": {}}
    for name, make, seed in (("deberta", make_deberta, SEEDS[0]), ("bert", make_bert, SEEDS[1])):
        torch.manual_seed(seed)
        tokenizer, config = make()
        config.vocab_size = len(tokenizer)
        encoder_config = config.encoder_config
        encoder_config.vocab_size = len(tokenizer)
        model = UniEncoderSpanGLiNER(config, tokenizer=tokenizer)
        tokenizer.add_tokens(["[FLERT]", config.ent_token, config.sep_token], special_tokens=True)
        model.resize_embeddings()
        with torch.no_grad():
            # So that logits are spread as those of a trained model are, and few are near 0.
            for part, parameter in model.model.named_parameters():
                if "LayerNorm" not in part:
                    fan_in = parameter.shape[-1] if parameter.dim() > 1 and "embeddings" not in part else 1
                    parameter.normal_(0, 1.2 * fan_in**-0.5 if parameter.dim() > 1 else 0.1)
        model.eval()
        shutil.rmtree(HERE / name, ignore_errors=True)
        model.save_pretrained(HERE / name, safe_serialization=name == "bert")
        model = GLiNER.from_pretrained(str(HERE / name))
        answers, logits = [], []
        for text in TEXTS:
            (found,) = model.inference([text], LABELS, batch_size=1)
            answers.append(
                [[each["start"], each["end"], each["label"], round(each["score"], 4)] for each in found]
            )
            prepared = model.prepare_batch([text], LABELS)
            batch = model.collate_batch(prepared["input_x"], LABELS)
            output = model.run_batch(batch)[0][0]  # [words, widths, labels]
            logits.append(output.numpy().astype(float).round(5).tolist())
        golden["models"][name] = {"answers": answers, "logits": logits}
    content = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
    (HERE / "golden.json").write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
