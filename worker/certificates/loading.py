"""Check a model that a worker has loaded against its certificate, if there is one."""

import logging
import threading
from pathlib import Path

import numpy as np

from vectormill.domain.errors import ModelError
from vectormill.models.model_card import ModelCard
from vectormill.models.specs import settle_spec
from worker.certificates.certificate import Certificate, find_bound, name_certificate, read_certificate
from worker.certificates.measuring import MAX_TEXT_CHARS, find_agreement
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest

logger = logging.getLogger(__name__)


def find_certificate(data_dir: Path, card: ModelCard) -> Certificate | None:
    """Return the certificate of this model; None if there is none, or only one of another revision.

    Raises ConfigurationError if the file was damaged or edited.
    """
    path = name_certificate(data_dir, card.name)
    if not path.is_file():
        return None
    certificate = read_certificate(path)
    was = certificate.spec.revision
    if settle_spec(card, certificate.spec).revision != card.revision:
        logger.warning("%s is not used: it is of revision %s, and this is %s.", path, was, card.revision)
        return None
    return certificate


def check_loaded(engine: Engine, certificate: Certificate | None) -> None:
    """Encode the known texts. Raise ModelError if a result leaves the certified bounds."""
    if certificate is None:
        return
    texts = list(certificate.known)
    rows = [np.frombuffer(bytes.fromhex(each), dtype="<f4") for each in certificate.known.values()]
    encoded = [text.encode() for text in texts]
    request = EncodeRequest("certificate", certificate.spec, encoded, False, MAX_TEXT_CHARS)
    found = engine.encode(request, threading.Event())
    report = engine.report()
    bound = find_bound(certificate, report["backend"]["value"], report["precision"]["value"])
    agreement = find_agreement(certificate.spec, np.stack(rows), found.vectors)
    if not agreement.min() >= bound:
        raise ModelError(
            f"The model process is faulty: {texts[int(agreement.argmin())][:40]!r} agrees with the reference of the "
            f"certificate by {agreement.min():.5f}, and at least {bound:.5f} is certified. If the model was changed on "
            "purpose, certify it again."
        )
    logger.info("%s agrees with its certificate by %.5f.", certificate.model, agreement.min())
