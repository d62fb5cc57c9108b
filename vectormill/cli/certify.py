"""Commands certify, verify and certificate: measure how well results agree with what they should be."""

from contextlib import contextmanager
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from vectormill.cli.command import Client, command, top
from vectormill.cli.exits import ITEMS_FAILED
from vectormill.cli.files import name_output, tell_written
from vectormill.cli.printing import Outcome, listing, print_facts, print_report, tell
from vectormill.files.outputs import check_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vectormill.models.model_card import ModelCard
    from vectormill.settings import Settings
    from worker.certificates.certificate import Certificate
    from worker.certificates.measuring import Choices, Tell


CERTIFY_CODES: Final = "Exit codes: 0 every promise is kept, 1 a promise is broken, 2 bad usage or input."
VERIFY_CODES: Final = "Exit codes: 0 as certified, 1 not as certified, 2 bad usage or input."


def show_certificate(certificate: "Mapping[str, Any]") -> None:
    print_report(
        f"{certificate['model']} compared with {certificate['method']['reference']} in fp32",
        ("backend", "precision", "attention", "placement", "smallest", "mean", "same ten best"),
        [
            (
                *(each["combination"][name] for name in ("backend", "precision", "attention")),
                f"{each['combination']['strategy']} on {each['combination']['devices']}",
                f"{each['smallest']:.6f}",
                f"{each['mean']:.6f}",
                f"{each['rank_agreement']:.1%}",
            )
            for each in certificate["measurements"]
        ],
    )


@command(
    top,
    "vectormill certify all-MiniLM-L6-v2",
    "vectormill certify ./my-model --precision fp32 --devices cpu --to my-model.json",
    note=CERTIFY_CODES,
    view=show_certificate,
)
def certify(
    model: str,
    *,
    devices: str = "auto",
    precision: str | None = None,
    backend: str | None = None,
    strategy: str | None = None,
    max_tokens: int | None = None,
    to: Path | None = None,
) -> Outcome:
    """Measure how well a model's results agree with its authors' code, and write a certificate.

    The reference is sentence-transformers or, where that is not installed, transformers: in fp32, one text at a time.
    Every backend, precision and placement that this machine has is measured, which takes minutes.

    Args:
        model (MODEL): A registered model, a directory, or OWNER/NAME on the Hugging Face hub.
        devices (DEVICES): auto, cpu, cuda, or a list such as cuda:0,cuda:1.
        precision: Measure only this precision: fp32, bf16, fp16 or int8. By default, all that the devices compute.
        backend: Measure only this backend. By default, all that are installed.
        strategy: Measure only this placement: replicate, pipeline, tensor or fully_sharded. By default, all four;
            offload is not measured.
        max_tokens (N, from 3): Read at most N tokens of a text. By default, the model's maximum, but no more than
            2048.
        to (FILE): The certificate to write. By default, a file of the model in the data directory, where workers look
            for it.
    """
    from vectormill.models.registry import open_registry
    from vectormill.settings import load_settings
    from worker.certificates.certificate import name_certificate
    from worker.certificates.measuring import Choices

    settings = load_settings()
    card = open_registry(settings, model).card(model, weights=True)
    path = to or name_certificate(settings.data_dir, model)
    if to is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    check_outputs([path], [card.path])
    choices = Choices(devices, precision, backend, strategy)
    certificate = write_measured(card, choices, max_tokens, settings, path)
    return Outcome(certificate.to_json(), ITEMS_FAILED if tell_flaws(certificate) else 0)


def write_measured(
    card: "ModelCard", choices: "Choices", max_tokens: int | None, settings: "Settings", path: Path
) -> "Certificate":
    """Measure a model with a progress bar, write its certificate to a file, and return it."""
    from worker.certificates.certificate import write_certificate
    from worker.certificates.measuring import Machine, certify

    with telling() as tell_progress:
        certificate = certify(card, choices, max_tokens, Machine.find(settings), tell_progress)
    write_certificate(certificate, path)
    tell(f"The certificate is in {path}.")
    return certificate


def tell_flaws(certificate: "Certificate") -> int:
    """Print what could not be measured and which promises are broken; return the number of the latter."""
    for unmeasured in certificate.unmeasured:
        tell(f"Not measured: {unmeasured.combination}: {unmeasured.reason}")
    broken = [each for each in certificate.measurements if not each.keeps_promise]
    for each in broken:
        tell(
            f"{each.combination}: the smallest agreement is {each.smallest:.5f}, below the promised {each.promise:g}."
        )
    return len(broken)


def show_verdict(verdict: "Mapping[str, Any]") -> None:
    if "job_id" not in verdict:
        show_certificate(verdict)
    elif verdict["num_compared"]:
        print_facts(
            [
                ("items compared", verdict["num_compared"]),
                ("encoded again with", verdict["encoded_with"]),
                *(
                    (
                        f"agreement of {each['result']}",
                        f"at least {each['smallest']:.6f}, {each['mean']:.6f} on average; promised {each['least']:g}",
                    )
                    for each in verdict["agreements"]
                ),
                ("below it", ", ".join(verdict["differing"]) if verdict["num_differing"] else "none"),
            ]
        )


@command(
    top,
    "vectormill verify",
    "vectormill verify my-model.json",
    "vectormill verify JOB --sample 200",
    note=VERIFY_CODES,
    view=show_verdict,
)
def verify(certificate: str | None = None, *, sample: int = 200, data_dir: Path | None = None) -> Outcome:
    """Measure what a certificate says again on this machine, or encode a sample of a job's texts again, and compare.

    Other weights or other files of the model are a failure. Another processor or other versions of libraries are told,
    and are none as long as the certified bounds are kept. The items of a job are read from its database, and encoded in
    a process of this command.

    Args:
        certificate (FILE|JOB): A certificate, or the id of an ended job. By default, the certificate that `certify`
            wrote last.
        sample (N, from 1): Compare N random items of the job.
    """
    try:
        job_id = UUID(certificate or "")
    except ValueError:
        return verify_certificate(certificate, data_dir)

    from vectormill.cli.keys import connected
    from worker.certificates.resampling import verify_job
    from worker.settings import load_worker_settings

    with connected(data_dir) as (engine, settings), telling() as tell_progress:
        verdict = verify_job(
            engine, job_id, sample, settings, load_worker_settings(), tell_progress, SystemRandom()
        )
    if not verdict.num_compared:
        tell("Nothing was compared: no item of the sample has a result of this job.")
    elif verdict.num_differing:
        tell(f"{verdict.num_differing} of {verdict.num_compared} items do not agree as promised.")
    is_good = verdict.num_compared and not verdict.num_differing
    return Outcome(verdict.to_json(), 0 if is_good else ITEMS_FAILED)


def verify_certificate(file: str | None, data_dir: Path | None) -> Outcome:
    """Measure a certificate again, print the differences, and return the verdict."""
    from vectormill.models.registry import open_registry
    from vectormill.settings import load_settings
    from worker.certificates.certificate import find_newest, read_certificate
    from worker.certificates.measuring import Machine, verify

    settings = load_settings(data_dir=data_dir)
    path = find_newest(settings.data_dir) if file is None else Path(file)
    certified = read_certificate(path)
    tell(f"Verifying {path}, of {certified.model}, measured at {certified.measured_at}.")
    card = open_registry(settings, certified.model).card(certified.model, weights=True)
    with telling() as tell_progress:
        verdict = verify(certified, card, Machine.find(settings), tell_progress)
    for sentence in (*verdict.notes, *verdict.failures):
        tell(sentence)
    tell("This is not what was certified." if verdict.failures else "Everything is as certified.")
    return Outcome(verdict.to_json(), ITEMS_FAILED if verdict.failures else 0)


@command(
    top, "vectormill certificate JOB > certificate.jsonl", "vectormill certificate JOB -o certificate.jsonl"
)
def certificate(client: Client, job_id: str, *, out: Path = Path("-")) -> str | None:
    """Write the certificate of an ended job: its spec, a digest for each chunk, and the workers that computed it.

    Args:
        out (--out -o, FILE): The file to write, or - for stdout.
    """
    path = name_output(out)
    check_outputs([path])
    client.certificate(job_id, path)
    return tell_written(path)


@command(
    top,
    "vectormill suspects",
    view=listing("job_id", "collection", "first_item", "num_items", "worker", "failed_at", "reason"),
)
def suspects(client: Client) -> "Iterator[Mapping[str, Any]]":
    """List the chunks of all jobs that a faulty worker computed and that cannot be encoded again.

    Items are counted from 0. `vectormill certificate JOB` names the chunks of one job; to replace their results, submit
    the texts again.
    """
    return client.suspects()


@contextmanager
def telling() -> "Iterator[Tell]":
    """Yield a function that shows what is being measured, and how much of it is done."""
    from vectormill.client.progress import Progress, ProgressView

    def look(told: "Mapping[str, Any]") -> ProgressView:
        stage, done, total = told["told"]
        return ProgressView(stage, f"{done} of {total}", done / total if total else None)

    with Progress(look) as progress:
        yield lambda *told: progress({"told": told})
