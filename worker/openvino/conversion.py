"""Conversion: a model as openvino reads it, made once from the torch module and kept on disk. Runs nothing.

A kept conversion is loaded without torch, which saves its memory and the seconds of its import.
"""

import hashlib
import json
import os
import shutil
import signal
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.processes.lifetimes import die_with_parent
from worker.encoder.backends import CannotRun
from worker.encoder.choice import COMPRESSED, INT8
from worker.encoder.encoder import EncoderOrder
from worker.openvino.compression import apply_compression
from worker.openvino.runtime import openvino as ov
from worker.tokens.tokenized import INPUT_IDS, TOKEN_TYPE_IDS

WORD_EMBEDDINGS: Final = "word_embeddings"
INPUTS: Final = (INPUT_IDS, "attention_mask", "pool_mask", WORD_EMBEDDINGS)
# Grows when the network or its inputs change, so that a conversion made by older code is not used.
CONVERSION_VERSION: Final = 4
COMPRESSION_VERSION: Final = 1
LARGEST_DEVIATION: Final = 1e-3
# The least cosine of vectors by compressed weights. Far below what real models keep (0.999 and 0.95): it
# tells a graph that is wrong (0) from one that is rounded.
SMALLEST_COSINES: Final = {INT8: 0.98}


class ConversionFailed(CannotRun):
    """openvino cannot run this network as torch does."""


def find_or_convert(order: EncoderOrder, precision: str) -> Path:
    """Return the folder of the converted network. Raises ConversionFailed; never leaves half a folder behind."""
    folder = order.cache_dir / "openvino" / fingerprint_conversion(order, precision)
    if (folder / "network.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".draft-"))
    try:
        convert_in_child(order, precision, draft)
        # Two workers may convert at the same time: the second finds the name taken, by the same content.
        os.rename(draft, folder)  # noqa: PTH104 - Path.rename would say the same
    except OSError:
        if not (folder / "network.json").is_file():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def convert_in_child(order: EncoderOrder, precision: str, folder: Path) -> None:
    """Convert in a process that then ends: torch and the tracer would keep 500 MiB here."""
    with ProcessPoolExecutor(
        max_workers=1,
        mp_context=get_context("spawn"),
        # It ends with us, whatever it is doing and however we end.
        initializer=die_with_parent,
        initargs=(signal.SIGKILL, os.getpid()),
    ) as pool:
        try:
            # Not the order itself: whom it tells of its reading cannot be sent to another process.
            pool.submit(convert_network, replace(order, on_read=None), precision, folder).result()
        except BrokenProcessPool as error:
            raise ConversionFailed("the process that converts the model ended without a word") from error


def fingerprint_conversion(order: EncoderOrder, precision: str) -> str:
    """Return a digest of the model's content, of what is added to it and of what converts it.

    fp32 and bf16 share a conversion: bf16 is a matter of arithmetic, chosen when the graph is compiled.
    """
    card = order.card
    values = [CONVERSION_VERSION, card.revision, str(card.path), card.pooling, card.dense]
    values += [version(package) for package in ("openvino", "torch", "transformers")]
    if precision in COMPRESSED:
        values += [precision, COMPRESSION_VERSION]
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=12).hexdigest()


def convert_network(order: EncoderOrder, precision: str, folder: Path) -> None:
    """Write network.xml, network.bin, words.bin and, last, network.json, after comparing the result with torch."""
    # Only here: a kept conversion needs none of it.
    import torch
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
    from openvino.tools.ovc import convert_model

    from worker.model.network import EncoderNetwork, check_tokenizer
    from worker.openvino.wordless_network import WordlessNetwork

    check_tokenizer(order.card)  # a conversion that is kept was compared
    whole = EncoderNetwork(order.card, torch.float32)
    # Another shape than the one that is traced, with padding: a shape or mask frozen by tracing shows here.
    probe = _make_input(torch, num_sequences=3, length=13)
    example = _make_input(torch, num_sequences=2, length=8)
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            # Each branch on a shape that tracing would freeze is reported. What matters is checked below.
            warnings.simplefilter("ignore")
            reads_types = _tells_types_apart(whole.transformer)
            names = (*INPUTS, TOKEN_TYPE_IDS) if reads_types else INPUTS
            types = _make_types(probe[1]) if reads_types else None
            expected = whole(*probe, **({} if types is None else {TOKEN_TYPE_IDS: types})).numpy()
            network = WordlessNetwork(whole)
            examples = [*example, network.embed(example[0])]
            examples += [] if types is None else [_make_types(example[1])]
            # torch would trace it once more to compare, which takes a third of the time; it is compared below.
            once = {"check_trace": False}
            traced = TorchScriptPythonDecoder(network, example_input=tuple(examples), trace_kwargs=once)
            converted = convert_model(traced, example_input=tuple(examples))
            for port, name in zip(converted.inputs, names, strict=True):
                port.get_tensor().set_names({name})  # the tracer has numbers for some
            inputs = [tensor.numpy() for tensor in (*probe, network.embed(probe[0]))]
            inputs += [] if types is None else [types.numpy()]
            _check_exact(_run(converted, inputs), expected)
            if precision in COMPRESSED:
                if not apply_compression(converted):
                    raise ConversionFailed(f"no weights were found that could be {precision}")
                _check_rounded(_run(converted, inputs), expected, precision)
            dim = network.write_table(folder / "words.bin", precision)
        ov.save_model(converted, folder / "network.xml", compress_to_fp16=False)
    except ConversionFailed:
        raise
    except (
        Exception
    ) as error:  # torch's tracer and openvino raise anything; torch itself still runs the model
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise ConversionFailed(reason) from error
    facts = {"pad_token_id": whole.pad_token_id, "word_embedding_dim": dim, "inputs": names}
    (folder / "network.json").write_text(json.dumps(facts))


def _tells_types_apart(transformer: Any) -> bool:
    """Return True if token_type_ids make a difference. RoBERTa takes them but has one type."""
    from worker.model.network import list_token_inputs

    has_types = int(getattr(transformer.config, "type_vocab_size", 0) or 0) > 1
    return has_types and TOKEN_TYPE_IDS in list_token_inputs(transformer)


def _run(converted: Any, inputs: list[NDArray[Any]]) -> NDArray[np.float32]:
    exactly = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    compiled = ov.Core().compile_model(converted, "CPU", exactly)
    found: NDArray[np.float32] = compiled(inputs)[0]
    return found


def _check_exact(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    deviation = float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6))
    if not deviation < LARGEST_DEVIATION:
        raise ConversionFailed(f"the converted network deviates from torch by {deviation:.1e}")


def _check_rounded(found: NDArray[np.float32], expected: NDArray[np.float32], precision: str) -> None:
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosine = float(((found * expected).sum(axis=1) / np.maximum(lengths, 1e-12)).min())
    if not cosine >= SMALLEST_COSINES[precision]:
        raise ConversionFailed(f"{precision} weights turn its vectors too far: to a cosine of {cosine:.2f}")


def _make_input(torch: Any, num_sequences: int, length: int) -> tuple[Any, Any, Any]:
    """Return ids, attention mask and pool mask of sequences of several lengths, the first without padding."""
    lengths = torch.arange(length, length - num_sequences, -1).unsqueeze(1)
    mask = (torch.arange(length) < lengths).long()
    return torch.arange(5, 5 + length) * mask, mask, mask.clone()


def _make_types(mask: Any) -> Any:
    """Return types as of pairs: the second half of each row is a second text."""
    is_second = mask.cumsum(dim=1) > mask.sum(dim=1, keepdim=True) // 2
    return is_second.long() * mask
