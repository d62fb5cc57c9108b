"""Commands certify and verify: measure how well a model agrees with its authors' code, and measure it again."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from vectormill.cli.command import command
from vectormill.cli.exits import ITEMS_FAILED
from vectormill.cli.printing import Outcome, print_report, tell

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vectormill.client.views import ProgressView
    from worker.certificates.certificate import Certificate

app = typer.Typer()

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
    app,
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
        strategy: Measure only this placement: replicate, pipeline, tensor or fully_sharded. By default, all.
        max_tokens (N, from 3): Read at most N tokens of a text. By default, the model's maximum, but no more than
            2048.
        to (FILE): The certificate to write. By default, a file of the model in the data directory, where workers look
            for it.
    """
    from vectormill.client.progress import Progress
    from vectormill.models.registry import open_registry
    from vectormill.settings import load_settings
    from worker.certificates.certificate import name_certificate, write_certificate
    from worker.certificates.measuring import Choices, certify
    from worker.devices.detect import detect_inventory
    from worker.settings import find_cache_dir, load_worker_settings

    settings = load_settings()
    path = to or name_certificate(settings.data_dir, model)
    card = open_registry(settings.models, model).card(model, weights=True)
    choices = Choices(devices, precision, backend, strategy)
    with Progress(look_at_measuring) as progress:
        certificate = certify(
            card,
            choices,
            max_tokens,
            load_worker_settings(),
            detect_inventory(),
            find_cache_dir(settings),
            lambda stage, done, total: progress({"stage": stage, "done": done, "total": total}),
        )
    write_certificate(certificate, path)
    tell(f"The certificate is in {path}.")
    return Outcome(certificate.to_json(), ITEMS_FAILED if tell_flaws(certificate) else 0)


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


@command(
    app,
    "vectormill verify",
    "vectormill verify my-model.json",
    note=VERIFY_CODES,
    view=show_certificate,
)
def verify(certificate: str | None = None) -> Outcome:
    """Measure what a certificate says again on this machine, and compare.

    Other weights or other files of the model are a failure. Another processor or other versions of libraries are told,
    and are none as long as the certified bounds are kept.

    Args:
        certificate (FILE): A certificate. By default, the one that `certify` wrote last.
    """
    from vectormill.client.progress import Progress
    from vectormill.models.registry import open_registry
    from vectormill.settings import load_settings
    from worker.certificates.certificate import find_newest, read_certificate
    from worker.certificates.verifying import verify
    from worker.devices.detect import detect_inventory
    from worker.settings import find_cache_dir, load_worker_settings

    settings = load_settings()
    path = find_newest(settings.data_dir) if certificate is None else Path(certificate)
    certified = read_certificate(path)
    tell(f"Verifying {path}, of {certified.model}, measured at {certified.measured_at}.")
    card = open_registry(settings.models, certified.model).card(certified.model, weights=True)
    with Progress(look_at_measuring) as progress:
        verdict = verify(
            certified,
            card,
            load_worker_settings(),
            detect_inventory(),
            find_cache_dir(settings),
            lambda stage, done, total: progress({"stage": stage, "done": done, "total": total}),
        )
    for sentence in (*verdict.notes, *verdict.failures):
        tell(sentence)
    tell("This is not what was certified." if verdict.failures else "Everything is as certified.")
    return Outcome(verdict.to_json(), ITEMS_FAILED if verdict.failures else 0)


def look_at_measuring(measuring: "Mapping[str, Any]") -> "ProgressView":
    """Return what is being measured, and how much of it is done."""
    from vectormill.client.views import ProgressView

    done, total = measuring["done"], measuring["total"]
    return ProgressView(measuring["stage"], f"{done} of {total}", done / total if total else None)
