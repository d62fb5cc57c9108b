"""Convert a model to openvino once, in a process of its own, and keep the result on disk.

A kept conversion is loaded without torch, which saves its memory and the seconds of its import.
"""

import hashlib
import json
import os
import shutil
import signal
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from vectormill.processes.lifetimes import die_with_parent
from worker.encoder.backends import CannotRun
from worker.encoder.choice import COMPRESSED
from worker.encoder.encoder import EncoderOrder

WORD_EMBEDDINGS: Final = "word_embeddings"
# Grows when the network or its inputs change, so that a conversion made by older code is not used.
CONVERSION_VERSION: Final = 4
COMPRESSION_VERSION: Final = 1


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
            pool.submit(convert_here, replace(order, on_read=None), precision, folder).result()
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


def convert_here(order: EncoderOrder, precision: str, folder: Path) -> None:
    """Convert in this process, which then holds torch."""
    from worker.openvino.converter import convert_network

    convert_network(order, precision, folder)
