"""Target: the generation that a run writes, and whether texts are kept in it."""

from dataclasses import dataclass

from sqlalchemy import Connection

from vectormill.collections.collection import LIVE, Generation
from vectormill.collections.collections import find_generation, keeps_texts
from vectormill.collections.generations import find_written
from vectormill.domain.encoding import EncodingSpec
from vectormill.runs.run import Run
from vectormill.runs.stages import RunTables


@dataclass(frozen=True, slots=True)
class Target:
    """`spec` is what the run asked for, in the vector space of the generation."""

    generation: Generation
    spec: EncodingSpec
    keep_text: bool
    stage: RunTables

    @property
    def is_live(self) -> bool:
        return self.generation.state == LIVE


def find_target(connection: Connection, run: Run) -> Target:
    """Return the target that the run began to write; its generation stays written until the transaction ends.
    Raise Conflict.
    """
    assert run.generation_id is not None, "the run has chosen when it began to read"
    return make_target(connection, run, find_written(connection, run.generation_id))


def make_target(connection: Connection, run: Run, generation: Generation) -> Target:
    keep_text = keeps_texts(connection, run.collection_id)
    return Target(generation, run.spec or generation.spec, keep_text, RunTables(run.id, generation))


def live_stage(connection: Connection, run: Run) -> RunTables:
    """Return the run's stage beside the live generation, whichever it writes."""
    return RunTables(run.id, find_generation(connection, run.collection))
