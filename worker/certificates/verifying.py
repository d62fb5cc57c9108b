"""Measure again what a certificate says, and judge the differences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vectormill.models.model_card import ModelCard
from worker.certificates.certificate import (
    Certificate,
    describe_changes,
    find_breaches,
    find_changed_files,
)
from worker.certificates.measuring import Machine, Tell, describe_circumstances, digest_files, measure


@dataclass(frozen=True, slots=True)
class Verdict:
    """The differences from a certificate: failures, and notes on circumstances, both as sentences.

    `found` is what was measured now; None if the model is another one, so that nothing was measured.
    """

    certified: Certificate
    found: Certificate | None
    notes: Sequence[str]
    failures: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        now = self.certified if self.found is None else self.found
        return {
            "model": self.certified.model,
            "is_as_certified": not self.failures,
            "failures": list(self.failures),
            "notes": list(self.notes),
            "method": now.to_json()["method"],
            "measurements": [] if self.found is None else self.found.to_json()["measurements"],
        }


def verify(certified: Certificate, card: ModelCard, machine: Machine, tell: Tell) -> Verdict:
    """Measure again and compare with the certified bounds.

    Nothing is measured if the model's files differ. Raises ModelError if this machine can measure nothing of
    it.
    """
    combinations = [each.combination for each in certified.measurements]
    failures = find_changed_files(certified, digest_files(card))
    if (card.revision, "+".join(card.pooling)) != (certified.spec.revision, certified.spec.pooling):
        failures.append(
            f"{card.name} is registered as {card.revision} with {'+'.join(card.pooling)} pooling, and was "
            f"{certified.spec.revision} with {certified.spec.pooling} pooling."
        )
    if failures:
        return Verdict(certified, None, (), failures)
    found = measure(card, certified.spec, certified.method.seed, combinations, machine, tell)
    notes = [f"Not measured here: {each.combination}: {each.reason}" for each in found.unmeasured]
    was = {each.combination: each for each in certified.measurements}
    now = describe_circumstances(machine.inventory, [each.combination for each in found.measurements])
    notes += describe_changes(certified.circumstances, now)
    if certified.method.reference != found.method.reference:
        notes.append(f"The reference is {found.method.reference} here, and was {certified.method.reference}.")
    failures = [
        breach for each in found.measurements for breach in find_breaches(was[each.combination], each)
    ]
    return Verdict(certified, found, notes, failures)
