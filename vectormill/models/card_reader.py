"""Have the files of a model read by a process that has nothing to lose, and take its answer as data.

What stands in these files is a stranger's: no process with secrets evaluates it, and what others need of a model stands
in its card. An answer is kept until a file changes, a refusal too, so that each model costs its limits once.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.models.identity import identify_directory
from vectormill.models.model_card import ModelCard, TableMissing
from vectormill.models.model_entry import ModelEntry
from vectormill.settings import process_environment

# The largest models known take a second and 300 MB, for a tokenizer of 34 MB.
PROCESSOR_SECONDS: Final = 5
MOST_BYTES: Final = 1 << 30
# The process may wait for a disk.
PATIENCE_SECONDS: Final = 30.0
LIMITS: Final = {
    "RLIMIT_AS": MOST_BYTES, "RLIMIT_CPU": PROCESSOR_SECONDS, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0,
}  # fmt: skip
OVERRUNS: Final = {
    MemoryError.__name__: f"{MOST_BYTES >> 30} GiB of memory",
    str(-signal.SIGXCPU): f"{PROCESSOR_SECONDS} s of processor time",
}
MOST_ANSWER_BYTES: Final = 8 << 20
# The end of a revision that the registry names, where files are read otherwise than by the release that stored it.
READ_ANEW: Final = "read"
# All of the environment that a Python may need to start.
KEPT_VARIABLES: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
BOOTSTRAP: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from vectormill.models.card_process import main; main(sys.argv[2])"
)
REFUSALS: Final = {error.__name__: error for error in (ModelError, UnsupportedModel, TableMissing)}


class _Answer(msgspec.Struct, frozen=True):
    """What the process has found: a card, or the kind of refusal and the reason."""

    card: ModelCard | None = None
    refusal: str = ""
    reason: str = ""


def read_card(
    name: str,
    directory: Path,
    entry: ModelEntry,
    *,
    needs_weights: bool = True,
    must_encode: bool = True,
    digests: Path | None = None,
) -> ModelCard:
    """Return the card of the model in `directory`, as `layouts.read_model_card` does, by a process of its own.

    Digests of large files are kept in the folder `digests`. Raise ModelError if the model is refused, or if its files
    are damaged or take more than the limits.
    """
    answer = _ask(name, directory, entry, needs_weights, must_encode, digests, stamp_files(name, directory))
    if answer.card is None:
        raise REFUSALS[answer.refusal](answer.reason)
    return replace(answer.card, name=name, path=directory)


def stamp_files(name: str, directory: Path) -> tuple[tuple[object, ...], ...]:
    """Return what changes when a file of the model, or of a folder in it, is changed or replaced.

    Raise ModelError for anything but files and folders, such as a pipe, whose reader would wait for ever.
    """
    stamps = []
    for path in sorted([*directory.glob("*"), *directory.glob("*/*")]):
        try:
            found = path.stat()
        except OSError:
            continue  # a link to nowhere
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise ModelError(f"{path} of model {name!r} is neither a file nor a folder; remove it.")
        stamps.append((str(path), found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns))
    return tuple(stamps)


def rename(card: ModelCard, identity: str | None) -> ModelCard:
    """Return the card under its identity, or by the name that its registry entry gives it, and with its former name."""
    former = card.revision
    # The identity has as many digits as the sample, which the names of a template and of an adapter may follow.
    revision = former if identity is None else identity + former[len(identity) :]
    revision = "+".join((revision, *card.named, *([READ_ANEW] if identity is None and card.rereads else ())))
    return replace(card, revision=revision, aliases=() if revision == former else (former,))


@cache
def _ask(
    name: str,
    directory: Path,
    entry: ModelEntry,
    needs_weights: bool,
    must_encode: bool,
    digests: Path | None,
    _: object,
) -> _Answer:
    """Return the answer of a new process. Raise ModelError if there is none for a reason that may pass.

    That process names a revision by samples, as former releases did. The digest of all bytes takes longer than it may,
    and parses nothing.
    """
    question = name, str(directory), entry.options, needs_weights, must_encode, LIMITS
    paths = [str(Path(__file__).parents[2]), *filter(os.path.isabs, sys.path)]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BOOTSTRAP, json.dumps(paths), json.dumps(question)],
            env={key: value for key, value in process_environment().items() if key in KEPT_VARIABLES},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise ModelError(f"The files of model {name!r} cannot be read now: {error}.") from error
    timer = threading.Timer(PATIENCE_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
    with process:
        assert process.stdout is not None
        written = process.stdout.read(MOST_ANSWER_BYTES)
        if len(written) == MOST_ANSWER_BYTES:
            process.kill()
    timer.cancel()
    path, answer = str(directory), _Answer()
    for line in written.splitlines():
        try:
            told = msgspec.json.decode(line, type=str | _Answer, dec_hook=lambda kind, value: kind(value))
        except (ValueError, RecursionError):
            continue
        path, answer = (told, answer) if isinstance(told, str) else (path, told)
    if answer.card is not None:
        is_named = entry.revision is not None or not must_encode
        return _Answer(rename(answer.card, None if is_named else identify_directory(directory, digests)))
    if answer.refusal in REFUSALS:
        return answer
    if most := OVERRUNS.get(answer.refusal or str(process.returncode)):
        end = f"takes more than {most} to read: it is damaged, or made to do harm"
        return _Answer(None, ModelError.__name__, f"The file {path} of model {name!r} {end}.")
    raise ModelError(
        f"The file {path} of model {name!r} cannot be read: the process that reads it has ended with status "
        f"{process.returncode}, after {PATIENCE_SECONDS:.0f} s at the latest."
    )
