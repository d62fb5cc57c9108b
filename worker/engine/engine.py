"""The engine turns texts into vectors, scores or records with one model on one device.

It knows nothing about chunks, jobs or Postgres. From a task it takes sequences to encode, and gives their
results back. Many threads call `encode` at the same time. Each tokenizes its own texts; the sequences of all
are batched together and encoded by one model process, while other threads tokenize or write to the database.
"""

import logging
import math
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import LATE, EncodingSpec
from vectormill.domain.errors import ModelError
from vectormill.jobs.bottleneck import COLLATE, COLLECT, RUN, TOKENIZE, WAIT
from vectormill.jobs.chunk import TokenEstimate
from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from vectormill.settings import process_environment
from vectormill.vectors.vector_types import find_unfit
from worker.batching.batch import Batch
from worker.batching.pool import BatchLimits
from worker.devices.device import CUDA, Device
from worker.encoder.encoder import Choice, EncoderOrder, EncoderReport, find_changes
from worker.encoder.way import Way
from worker.engine.executor import Exchange, Executor, Proof
from worker.engine.in_flight import KnownTexts
from worker.engine.request import EncodeRequest, EncodeResult, wait_unless_cancelled
from worker.engine.request_queue import QUERY_PLACES, Admission, RequestQueue, Ticket
from worker.engine.reuse import VectorReuse
from worker.engine.tuner import Tuner, find_batch_cost
from worker.loading import LoadingDisplay
from worker.placement.obstacles import find_obstacle
from worker.runner.memory import MemoryReport
from worker.runner.starter import RunnerStarter, Sharing
from worker.settings import WorkerSettings
from worker.tasks.finishing import find_least_cosine, find_turned, find_unique
from worker.tasks.table import make_tasks
from worker.tasks.task import Finished, WorkerTask, advance
from worker.tokens.word_cache import WordTally
from worker.tuning.tuner import WayTuner, find_record, list_ways, refuse_way

logger = logging.getLogger(__name__)

DEFAULT_FACTORY: Final = "worker.encoder.backends:load_encoder"
COLLECTIVE_GRACE_SECONDS: Final = 60.0
# The texts that a model process encodes to show that it still works (worker.engine.in_flight).
KNOWN_TEXT: Final = "A canary that still sings tells the miners that the air is good."
KNOWN_TEXTS: Final = (
    KNOWN_TEXT,
    "short",
    "SELECT name, price FROM products WHERE stock > 0 ORDER BY price LIMIT 10;",
    "Les canaris chantent encore, et l'air de la mine est bon.",
    "Пока канарейка поёт, воздух в шахте хорош.",
    "金丝雀还在唱歌，矿井里的空气就是好的。",
    "The first canary was carried down in a wooden cage, the second in one of brass, and the third was let out of it "
    "to fly along the seam, for the miners had learned to trust its eyes as much as its lungs.",
)


class Engine:
    """The encoding engine of one model on one device, or on several that share it.

    Start it once, call `encode` from any thread, stop it once. A text of more than `longest_text_tokens`, for which
    the plan has no room, fails before it is encoded; 0 stands for no limit. Batches are so short that a query is
    answered in `query_timeout_seconds` behind them. Raises ModelError if devices cannot share the model in the way that
    was planned.
    """

    def __init__(
        self,
        card: ModelCard,
        device: Device,
        settings: WorkerSettings,
        cache_dir: Path,
        *,
        factory: str = DEFAULT_FACTORY,
        sharing: Sharing | None = None,
        longest_text_tokens: int = 0,
        query_timeout_seconds: float = math.inf,
        display: LoadingDisplay | None = None,
    ) -> None:
        if sharing is not None and (
            obstacle := find_obstacle(
                card,
                sharing.replica.strategy,
                sharing.devices,
                precision=settings.precision,
                backend=settings.backend,
                is_reproducible=settings.reproducible,
            )
        ):
            raise ModelError(f"{card.name} cannot be shared by {sharing.replica.strategy}: {obstacle}.")
        num_threads = settings.threads or device.num_threads
        self._card = card
        self.device = device
        self._tuner = Tuner(card, device, settings, sharing, query_timeout_seconds)
        self._words = WordTally()
        self._tasks = make_tasks(card, lambda: self._gives_vectors, self._words, device.num_tokenizer_threads)
        self._own = own = next(iter(self._tasks.values()))
        inputs = [own.make_known_inputs(text) for text in KNOWN_TEXTS]
        self._known = Batch({name: Ragged.join([each[name] for each in inputs]) for name in inputs[0]})
        limits = BatchLimits(self._tuner.max_batch_tokens(1))
        self._queue = RequestQueue(
            limits, self._tuner.max_batch_tokens, longest_text_tokens=longest_text_tokens
        )
        self._reuse_bytes = settings.reuse_bytes
        self._reuse = VectorReuse(settings.reuse_bytes)
        self._num_reused = 0
        self._loaded: EncoderReport | None = None
        self._changes: tuple[str, ...] = ()
        order = EncoderOrder(
            card,
            device,
            settings.backend,
            settings.precision,
            num_threads,
            cache_dir,
            settings.attention,
            switches=settings.switches,
            is_reproducible=settings.reproducible,
        )
        # The record of the measured ways, if there is one, and a note on the way in service for reports.
        self.tuned = find_record(order) if sharing is None else None
        self.way_note = ""
        if sharing is None and self.tuned is None and len(list_ways(order)) > 1:
            is_tried = device.kind == CUDA  # by the worker itself (worker.tuning.self_tuning)
            self.way_note = (
                "not yet measured here"
                if is_tried
                else f"not measured here: `vectormill tune {card.name}` does"
            )
        self._executor = Executor(
            RunnerStarter(
                factory,
                order if self.tuned is None else replace(order, way=self.tuned.way),
                process_environment(),
                sharing=sharing,
                # A rank waits this long for another that is still loading. It is longer than both timeouts of
                # the executor, which is to end a hanging process first, because it logs where every rank was.
                # Torch's own time-out is only for a worker whose executor hangs itself.
                collective_timeout_seconds=max(
                    settings.model_load_timeout_seconds, settings.forward_timeout_seconds
                )
                + COLLECTIVE_GRACE_SECONDS,
            ),
            settings,
            self._queue,
            self._tuner,
            KnownTexts(self._known, self._find_flaw),
            self._adopt,
            self.refuse_way,
            display,
        )
        self._admission = {  # keyed by whether a request is interactive
            True: Admission(settings.interactive_slots + QUERY_PLACES),
            False: Admission(settings.slots, lambda: self.max_tokens_in_flight),
        }
        self._stage_seconds = {TOKENIZE: 0.0, COLLECT: 0.0}
        self._stage_lock = threading.Lock()

    def start(self) -> None:
        """Start the engine and wait until the model is loaded. Raise ModelError if it cannot be loaded."""
        self._executor.start()

    def _adopt(self, report: EncoderReport, memory: MemoryReport | None) -> None:
        """Adapt to a newly loaded encoder: a restarted process may have less memory or lack a kernel.

        The executor's thread calls this before the process gets a batch.
        """
        before, self._loaded = self._loaded, report
        if before is not None:
            self._changes = find_changes(before, report)
            for change in self._changes:
                logger.warning("%s restarted with a different encoder: %s", self._card.name, change)
            if before.gives_vectors != report.gives_vectors:
                raise ModelError(f"{self._card.name} restarted with a different kind of results.")
            # No proof of the new process vouches for vectors of the old one.
            self._reuse = VectorReuse(self._reuse_bytes)
        cost = find_batch_cost(self._card, report)
        self._tuner.begin(report, memory, cost)
        self._queue.adopt(cost, report.num_started, report.num_computed)

    def _find_flaw(self, results: Ragged, expected: NDArray[Any]) -> str:
        """Return what is wrong with results of a known text: another vector than the precision promises, at least."""
        flaw = self._own.find_flaw(results, expected)
        if (
            flaw
            or self._loaded is None
            or not self._loaded.gives_vectors
            or self._card.classifier is not None
            or expected.dtype != np.float32  # several outputs, which the task has compared
        ):
            return flaw
        least = find_least_cosine(self._loaded.precision.value, self._loaded.switches)
        return find_turned(results, expected, least)

    def stop(self) -> None:
        """End the model process. Waiting requests fail with EngineStopped."""
        self._executor.stop()

    def prove(self) -> Proof:
        """Ask for a proof that the model process still gives the results that it gave when it was loaded.

        The answer says what is wrong, and is empty if nothing is; it is None if the process ended before it could
        answer. If something is wrong, the engine ends.
        """
        return self._executor.prove()

    def make_way_tuner(self) -> WayTuner:
        """Return a tuner that tries other ways to run this model, in processes of its own beside that of the engine."""
        # A task of its own, since the engine's thread uses that of the engine.
        return WayTuner(self._executor.starter, next(iter(make_tasks(self._card).values())), self._known)

    def exchange(self, way: Way | None) -> Exchange:
        """Run the model in another way once the batches in flight are done and `confirm` is called. No text is lost.

        None stands for the usual way.
        """
        return self._executor.exchange(way)

    def refuse_way(self, flaw: str) -> None:
        """Note for all workers of the machine that the measured way of the model cannot be used, if it has one."""
        order = self._executor.starter.order
        if order.way is not None:
            self.way_note = f"{order.way} was measured to be faster, but is not used: {flaw}"
            self.tuned = refuse_way(order, flaw)

    def confirm(self, exchange: Exchange) -> None:
        """Replace the drained process."""
        exchange.is_confirmed.set()
        self._executor.wake()

    def is_healthy(self) -> bool:
        """Return True unless the engine has ended for good.

        An engine that is replacing a lost model process counts as healthy.
        """
        return self._executor.is_alive

    def encode(self, request: EncodeRequest, cancelled: threading.Event) -> EncodeResult:
        """Encode all texts and return their results, with a reason for each text that has none.

        The call blocks; any number of threads may make it. Raises ModelError if the spec is not for exactly
        this model, EncodingCancelled, EngineStopped, and RunnerDied if the model process died during a batch
        with texts of this request. The death of a process does not affect requests without texts in such a
        batch.
        """
        task = self._find_task(request.spec)
        asked_at = time.perf_counter()
        num_tokens = TokenEstimate(request.spec).of_all(request.texts)
        with self._admission[request.interactive].hold(num_tokens, cancelled, self.is_healthy):
            dimension = self._card.dimension if self._gives_vectors else None
            ticket = Ticket(dimension, is_interactive=request.interactive)
            ticket.wait_seconds = time.perf_counter() - asked_at
            unique, places = find_unique(request.texts)
            rounds = task.process(request.spec, unique, request.max_text_chars)
            answered = None
            while True:
                start = time.perf_counter()
                may_ask = answered is None or task.asks_again
                with self._queue.hold_partial_batches() if may_ask else nullcontext():
                    asked = advance(rounds, answered)
                seconds = time.perf_counter() - start
                if isinstance(asked, Finished):
                    return self._collect(asked, ticket, places, seconds)
                ticket.tokenize_seconds += seconds
                self._count_stage(TOKENIZE, seconds)
                ticket.lay(*asked)
                self._run(ticket, cancelled)
                answered = ticket.join(), ticket.failures

    @property
    def max_tokens_in_flight(self) -> int:
        """Return how many tokens of bulk this worker wants at once: waiting, tokenized or computed."""
        return self._tuner.max_tokens_in_flight

    @property
    def run_seconds(self) -> float:
        """Return the seconds since the start in which the device had batches of this worker."""
        return self._queue.tally.busy_seconds

    def find_pid(self, rank: int = 0) -> int | None:
        """Return the process id of the model process of this rank; None while there is none."""
        return self._executor.find_pid(rank)

    def report(self) -> dict[str, Any]:
        """Return what runs here, why, and how fast, as a JSON object for the workers table."""
        tally, loaded = self._queue.tally, self._executor.report
        choices = asdict(loaded) if loaded else {}
        return {
            "model": self._card.name,
            "revision": self._card.revision,
            "aliases": self._card.aliases,
            "pooling": "+".join(self._card.pooling),
            "state": self._executor.state,
            "state_reason": self._executor.reason,
            **choices,
            "way": asdict(self._describe_way(loaded)) if loaded else None,
            "ways": self.tuned.describe() if self.tuned else [],
            **self._tuner.describe(),
            "max_tokens_in_flight": self.max_tokens_in_flight,
            "num_batches": tally.num_batches,
            "num_sequences": tally.num_sequences,
            "num_tokens": tally.num_tokens,
            "num_computed_tokens": tally.num_computed_tokens,
            # The rates of workers that share a GPU add up to its rate.
            "tokens_per_second": tally.num_tokens / tally.busy_seconds if tally.busy_seconds else 0.0,
            "padding_waste": 1 - tally.num_tokens / tally.num_computed_tokens
            if tally.num_computed_tokens
            else 0.0,
            "num_reused": self._num_reused,
            "num_words": self._words.num_words,
            "num_known_words": self._words.num_known,
            "num_restarts": self._executor.num_restarts,
            "num_exchanges": self._executor.num_exchanges,
            "changes_at_restart": self._changes,
            "stage_seconds": self._stage_seconds | {COLLATE: tally.collate_seconds, RUN: tally.run_seconds},
        }

    def _describe_way(self, loaded: EncoderReport) -> Choice:
        """Return the way in which the model is run, with the reason."""
        reasons = [self.way_note] if self.way_note else []
        if (tuned := self.tuned) is not None:
            best = tuned.way
            if best.backend == loaded.backend.value and set(best.switches) == set(loaded.switches):
                reasons.insert(0, best.reason)
        return Choice(str(Way(loaded.backend.value, loaded.switches)), "; ".join(reasons))

    @property
    def _gives_vectors(self) -> bool:
        """Return True if the model answers with vectors of the dimension on its card."""
        return self._loaded is None or self._loaded.gives_vectors

    def _find_task(self, spec: EncodingSpec) -> WorkerTask:
        """Return the task of a spec.

        Raise ModelError if the spec is for another model, since vector spaces must not mix.
        """
        asked = (spec.model, spec.revision, spec.model_pooling)
        here = (self._card.name, self._card.revision, "+".join(self._card.pooling))
        if spec.revision not in self._card.revisions or (asked[0], asked[2]) != (here[0], here[2]):
            raise ModelError(
                f"The job needs the model {' '.join(asked)}, but this worker serves {' '.join(here)}. Start a worker "
                "with that model, or submit the job again."
            )
        if not set(spec.outputs.split(",")) <= set(self._card.outputs):
            raise ModelError(
                f"The job needs the outputs {spec.outputs}, but {self._card.name} computes only "
                f"{', '.join(self._card.outputs)}."
            )
        if spec.long_texts == LATE and not (self._loaded is None or self._loaded.pools_passages):
            raise ModelError(
                f"The job needs long_texts={LATE}, for which {self._loaded.backend.value} gives no states of tokens. "
                "Start a worker with the backend torch."
            )
        if spec.task not in self._tasks:
            raise ModelError(
                f"The job's task is {spec.task}, but {self._card.name} supports only {', '.join(self._tasks)}."
            )
        return self._tasks[spec.task]

    def _run(self, ticket: Ticket, cancelled: threading.Event) -> None:
        """Reuse vectors that were computed lately, and wait until the others are computed."""
        start = time.perf_counter()
        run_before = ticket.run_seconds
        reuse = self._reuse  # what a process has computed is kept with the vectors of that process
        digests = reuse.digest(ticket.texts.inputs, ticket.positions, ticket.constants)
        known, vectors = reuse.find(digests)
        ticket.take_over(known, vectors)
        self._queue.add(ticket)
        self._executor.wake()
        wait_unless_cancelled(ticket.done, cancelled, lambda: self._queue.withdraw(ticket))
        if ticket.error is not None:
            raise ticket.error
        computing = ticket.run_seconds - run_before
        ticket.wait_seconds += max(time.perf_counter() - start - computing, 0.0)
        digests = np.delete(digests, known, axis=0)
        if ticket.vectors is not None and len(digests):
            is_sound = ~find_unfit(ticket.vectors)[0]
            is_sound[list(ticket.failures)] = False
            is_sound = is_sound[ticket.positions]
            reuse.keep(digests[is_sound], ticket.vectors, ticket.positions[is_sound])

    def _collect(
        self, finished: Finished, ticket: Ticket, places: NDArray[np.int64], seconds: float
    ) -> EncodeResult:
        """Return one row for every item, duplicates included. It took `seconds` to finish the distinct ones."""
        start = time.perf_counter()
        results, failures = finished.results, finished.failures
        if len(places) != len(results):
            results = results.take(places)
        is_sound = np.ones(len(finished.num_tokens), dtype=np.bool_)
        is_sound[list(failures)] = False
        num_tokens, truncated = finished.num_tokens[places], finished.truncated[places]
        num_reused = ticket.num_reused + int(is_sound[places].sum() - is_sound.sum())
        seconds += time.perf_counter() - start
        self._count_stage(COLLECT, seconds)
        with self._stage_lock:
            self._num_reused += num_reused
        return EncodeResult(
            results=results,
            failures={
                item: failures[index] for item, index in enumerate(places.tolist()) if index in failures
            }
            if failures
            else {},
            num_tokens=num_tokens,
            num_computed_tokens=int(num_tokens.sum()) + ticket.num_padding_tokens,
            truncated=truncated,
            stage_seconds={
                TOKENIZE: ticket.tokenize_seconds,
                WAIT: ticket.wait_seconds,
                COLLATE: ticket.collate_seconds,
                RUN: ticket.run_seconds,
                COLLECT: seconds,
            },
            num_reused=num_reused,
            num_passages=int(finished.num_passages[places].sum()),
        )

    def _count_stage(self, stage: str, seconds: float) -> None:
        with self._stage_lock:
            self._stage_seconds[stage] += seconds
