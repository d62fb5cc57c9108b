"""Checking: what a collection says of itself against what is there. It changes nothing but its own report.

Whether every row has a vector with a direction, a score or records, whether texts that are encoded again come out as
they are kept, what of an exact search the index finds, and whether anything lies about that belongs to nobody.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from indexer.context import RunContext
from indexer.measures import measure_recall, scan_validity, scan_vectors
from indexer.phases.samples import compare_sample
from vectormill.collections.collection import RECORDS, SCORES, VECTORS, Generation
from vectormill.collections.collections import find_generation
from vectormill.collections.strays import find_strays, sample_hashes
from vectormill.domain.errors import EncodingTimeout
from vectormill.jobs.item import Item
from vectormill.runs.run import CHECKING

DEFAULT_SAMPLE: Final = 200
LEAST_RECALL: Final = 0.95
# Hashed at once: of long texts some tens of megabytes.
HASHED_TEXTS: Final = 1000
RESULT_WORDS: Final = {VECTORS: "another vector", SCORES: "another score", RECORDS: "other records"}


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of a check: figures by name, and a sentence for each problem and for each thing left unchecked."""

    found: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        told = {"problems": self.problems, "unchecked": self.unchecked, "is_good": not self.problems}
        return self.found | told


def check_collection(context: RunContext) -> None:
    """Look at the live generation; what was found is in the report, with `problems` as sentences, and what was not
    looked at in `unchecked`.

    Options of the run: `sample`, the texts that are encoded again, 0 for none.
    """
    with context.engine.connect() as connection:
        generation = find_generation(connection, context.run.collection)
    findings = Findings({"generation": generation.id})
    for look in (_look_at_results, _look_at_strays, _look_at_hashes, _look_at_index, _look_at_texts):
        context.check()
        look(context, generation, findings)
    context.report(CHECKING, findings.to_json())


def _name(keys: list[str]) -> str:
    return ", ".join(repr(key) for key in keys[:3])


def _look_at_results(context: RunContext, generation: Generation, findings: Findings) -> None:
    if generation.kind != VECTORS:
        validity = scan_validity(context.engine, generation, check=context.check)
        findings.found[generation.kind] = validity.to_json()
        findings.problems.extend(validity.list_problems())
        return
    soundness = scan_vectors(context.engine, generation, check=context.check)
    findings.found["vectors"] = soundness.to_json()
    if soundness.num_not_finite or soundness.num_zero:
        findings.problems.append(
            f"{soundness.num_not_finite + soundness.num_zero:,} vectors have no direction: they are zero or not finite "
            f"({_name(soundness.broken_keys)})."
        )
    if soundness.num_odd_norms:
        findings.problems.append(
            f"{soundness.num_odd_norms:,} vectors have not length 1, as the model promises; they are from "
            f"{soundness.smallest_norm:.3f} to {soundness.largest_norm:.3f} long."
        )


def _look_at_strays(context: RunContext, generation: Generation, findings: Findings) -> None:
    with context.engine.connect() as connection:
        strays = find_strays(connection, generation)
    findings.found["strays"] = {
        "num_attributes_without_row": strays.num_attributes,
        "num_rows_of_deleted_keys": strays.num_deleted_keys,
        "missing_tables": strays.missing_tables,
        "tables_of_no_collection": strays.left_tables,
        "view_reads": strays.view_reads,
    }
    if strays.num_attributes:
        findings.problems.append(
            f"{strays.num_attributes:,} attributes have no row ({_name(strays.attribute_keys)})."
        )
    if strays.num_deleted_keys:
        findings.problems.append(
            f"{strays.num_deleted_keys:,} keys were deleted and are there ({_name(strays.deleted_keys)})."
        )
    if strays.missing_tables:
        findings.problems.append(
            f"Tables of its generations are missing: {', '.join(strays.missing_tables)}."
        )
    if strays.left_tables:
        findings.problems.append(
            f"Tables belong to no collection: {', '.join(strays.left_tables)}; the scheduler drops them."
        )
    if generation.table_name not in strays.view_reads.split(", "):
        findings.problems.append(
            f"The view {generation.collection} reads {strays.view_reads or 'nothing of ours'}, and not the live "
            f"generation {generation.table_name}."
        )


def _look_at_hashes(context: RunContext, generation: Generation, findings: Findings) -> None:
    with context.engine.connect() as connection:
        sample = sample_hashes(connection, generation, HASHED_TEXTS)
    others = [key for key, content, known in sample if Item(key, content).content_hash() != known]
    findings.found["hashes"] = {
        "num_compared": len(sample),
        "num_differing": len(others),
        "differing_keys": others[:20],
    }
    if others:
        findings.problems.append(
            f"{len(others):,} kept texts are not those of their {generation.kind} ({_name(others)})."
        )
    if not sample:
        findings.unchecked.append("Hashes of texts: the collection keeps none.")


def _look_at_index(context: RunContext, generation: Generation, findings: Findings) -> None:
    if generation.kind != VECTORS:
        findings.found["recall"] = None
        findings.unchecked.append(f"Recall: {generation.kind} have no vector index.")
        return
    recall = measure_recall(context.engine, generation, check=context.check)
    findings.found["recall"] = recall.to_json() if recall is not None else None
    if recall is None:
        findings.unchecked.append("Recall: there is no index on the vectors, or there are too few rows.")
    elif recall.value < LEAST_RECALL:
        findings.problems.append(
            f"The index {recall.index} finds {recall.value:.1%} of the {recall.limit} nearest rows, less than "
            f"{LEAST_RECALL:.0%}; build it anew: `vectormill collections index {generation.collection} --rebuild`."
        )


def _look_at_texts(context: RunContext, generation: Generation, findings: Findings) -> None:
    size = int(context.run.options.get("sample", DEFAULT_SAMPLE))
    if size <= 0:
        findings.unchecked.append("Texts encoded again: none were asked for.")
        return
    try:
        agreement = compare_sample(context.engine, context.settings, generation, size, check=context.check)
    except EncodingTimeout as error:
        findings.unchecked.append(f"Texts encoded again: {error}")
        return
    findings.found["texts"] = agreement.to_json()
    if not agreement.num_compared:
        findings.unchecked.append(f"Texts encoded again: {agreement.reason}.")
    elif not agreement.is_good:
        what = RESULT_WORDS[generation.kind]
        findings.problems.append(
            f"{agreement.num_differing:,} of {agreement.num_compared:,} texts encode to {what} now "
            f"({_name(agreement.differing_keys)}); the worst agrees to {agreement.smallest:.4f}."
        )
