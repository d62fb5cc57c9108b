"""OpenVINOEncoder: runs the network on a CPU with openvino, converted from the torch module once and kept on disk.

A kept conversion is loaded without torch, which saves its memory and the seconds of its import.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from worker.batching.token_batch import TokenBatch
from worker.model.choice import BF16, FP32
from worker.model.encoder import Choice, Encoder, EncoderOrder, EncoderReport, device_choice
from worker.model.padding import pad_batch

INPUTS: Final = ("input_ids", "attention_mask", "pool_mask")
HINTS: Final = {FP32: "f32", BF16: "bf16"}
# Grows when the network or its inputs change, so that a conversion made by older code is not used.
CONVERSION_VERSION: Final = 1
LARGEST_DEVIATION: Final = 1e-3


class ConversionFailed(Exception):
    """openvino cannot run this network as torch does."""


class OpenVINOEncoder(Encoder):
    """A converted network on some cores of a CPU; padded batches of any shape."""

    def __init__(
        self, order: EncoderOrder, backend: Choice, precision: Choice, notes: tuple[str, ...] = ()
    ) -> None:
        start = time.perf_counter()
        core = ov.Core()
        folder = find_or_convert(order)
        compiled = core.compile_model(
            core.read_model(folder / "network.xml"),
            "CPU",
            {
                # f32 is said explicitly: the default is whatever the processor computes fastest.
                "INFERENCE_PRECISION_HINT": HINTS[precision.value],
                "PERFORMANCE_HINT": "LATENCY",
                "NUM_STREAMS": "1",
                "INFERENCE_NUM_THREADS": str(order.num_threads),
                # The process is pinned to its cores from outside, where two workers can be told apart.
                "ENABLE_CPU_PINNING": "NO",
            },
        )
        self._request = compiled.create_infer_request()
        self._pad_token_id = int(json.loads((folder / "network.json").read_text())["pad_token_id"])
        self._report = EncoderReport(
            device=device_choice(order),
            backend=backend,
            precision=precision,
            attention="openvino",
            num_threads=order.num_threads,
            load_seconds=time.perf_counter() - start,
            notes=notes,
        )

    def encode(self, batch: TokenBatch) -> NDArray[np.float32]:
        padded = pad_batch(batch, self._pad_token_id)
        outputs = self._request.infer(
            dict(zip(INPUTS, (padded.input_ids, padded.attention_mask, padded.pool_mask), strict=True)),
            share_inputs=True,
        )
        # A copy: the output lies in memory of the request, which the next batch overwrites.
        return np.array(outputs[0], dtype=np.float32)

    def describe(self) -> EncoderReport:
        return self._report


def find_or_convert(order: EncoderOrder) -> Path:
    """The folder of the converted network. Raises ConversionFailed; never leaves half a folder behind."""
    folder = order.cache_dir / "openvino" / fingerprint_conversion(order)
    if (folder / "network.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".draft-"))
    try:
        convert_in_child(order, draft)
        # Two workers may convert at the same time: the second finds the name taken, by the same content.
        os.rename(draft, folder)  # noqa: PTH104 - Path.rename would say the same
    except OSError:
        if not (folder / "network.json").is_file():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def convert_in_child(order: EncoderOrder, folder: Path) -> None:
    """Converts in a process that then ends: torch and the tracer would keep 500 MiB in this one, for nothing."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        try:
            pool.submit(convert_network, order, folder).result()
        except BrokenProcessPool as error:
            raise ConversionFailed("the process that converts the model ended without a word") from error


def fingerprint_conversion(order: EncoderOrder) -> str:
    """Changes with the model's content, with what is added to it, and with what converts it."""
    card = order.card
    values = [CONVERSION_VERSION, card.revision, str(card.path), card.pooling, card.dense]
    values += [version(package) for package in ("openvino", "torch", "transformers")]
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=12).hexdigest()


def convert_network(order: EncoderOrder, folder: Path) -> None:
    """Writes network.xml, network.bin and, last, network.json. The result is compared with torch before it is kept."""
    import torch  # only here: a kept conversion needs none of it

    from worker.model.network import EncoderNetwork

    network = EncoderNetwork(order.card, torch.float32)
    example = _example(torch, num_sequences=2, length=8)
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            # Each branch on a shape that tracing would freeze is reported. What matters is checked below.
            warnings.simplefilter("ignore")
            converted = ov.convert_model(network, example_input=example)
        ov.save_model(converted, folder / "network.xml", compress_to_fp16=False)
        compiled = ov.Core().compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        # Another shape than the one that was traced, with padding: a shape or mask frozen by tracing shows here.
        probe = _example(torch, num_sequences=3, length=13)
        with torch.inference_mode():
            expected = network(**probe).numpy()
        found = compiled({name: tensor.numpy() for name, tensor in probe.items()})[0]
        deviation = float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6))
    except (
        Exception
    ) as error:  # torch's tracer and openvino raise anything; torch itself still runs the model
        raise ConversionFailed(
            str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        ) from error
    if not deviation < LARGEST_DEVIATION:
        raise ConversionFailed(f"the converted network deviates from torch by {deviation:.1e}")
    (folder / "network.json").write_text(json.dumps({"pad_token_id": network.pad_token_id}))


def _example(torch: Any, num_sequences: int, length: int) -> dict[str, Any]:
    """Sequences of different lengths, the first without padding."""
    lengths = torch.arange(length, length - num_sequences, -1).unsqueeze(1)
    mask = (torch.arange(length) < lengths).long()
    return dict(zip(INPUTS, (torch.arange(5, 5 + length) * mask, mask, mask.clone()), strict=True))
