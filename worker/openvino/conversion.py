"""Convert a model to openvino once, in a separate process, and cache the result on disk.

A cached conversion is loaded without torch, which saves its memory and the seconds of its import.
"""

import hashlib
import json
import os
import shutil
import tempfile
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

from vectormill.processes.lifetimes import open_child
from worker.encoder.encoder import EncoderOrder
from worker.openvino.network import STATES, ConversionFailed, list_outputs
from worker.placement.footprint import COMPRESSED

# Increase this when the network or its inputs change, so that conversions by older code are not used.
CONVERSION_VERSION: Final = 5
COMPRESSION_VERSION: Final = 1


def find_or_convert(order: EncoderOrder, precision: str) -> Path:
    """Return the folder of the converted network, converting it if needed.

    Raises ConversionFailed. Never leaves a partly written folder behind.
    """
    folder = order.cache_dir / "openvino" / fingerprint_conversion(order, precision)
    if (folder / "network.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".draft-"))
    try:
        convert_in_child(order, precision, draft)
        # Two workers may convert at once: the second finds the folder in place, with the same content.
        os.rename(draft, folder)  # noqa: PTH104 - Path.rename would say the same
    except OSError:
        if not (folder / "network.json").is_file():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def convert_in_child(order: EncoderOrder, precision: str, folder: Path) -> None:
    """Convert in a child process: torch and the tracer would keep 500 MiB of this process's memory."""
    with open_child() as pool:
        try:
            # The callback for progress is removed, because it cannot be sent to another process.
            pool.submit(convert_here, replace(order, on_read=None), precision, folder).result()
        except BrokenProcessPool as error:
            raise ConversionFailed(
                "the process that converts the model ended without an error message"
            ) from error


def fingerprint_conversion(order: EncoderOrder, precision: str) -> str:
    """Return a digest of the model's content, of what is added to it and of the converting code's version.

    fp32 and bf16 share a conversion, because the arithmetic is chosen when the graph is compiled.
    """
    card = order.card
    values = [
        CONVERSION_VERSION,
        card.revision,
        str(card.path),
        card.pooling,
        [layer.folder for layer in card.dense],
    ]
    values += [version(package) for package in ("openvino", "torch", "transformers")]
    if STATES in list_outputs(card):
        values += [card.outputs]
    if precision in COMPRESSED:
        values += [precision, COMPRESSION_VERSION]
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=12).hexdigest()


def convert_here(order: EncoderOrder, precision: str, folder: Path) -> None:
    """Convert in this process, which then has torch loaded."""
    from worker.openvino.converter import convert_network

    convert_network(order, precision, folder)
