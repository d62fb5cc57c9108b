"""Lines of the product that must not be removed or changed, each with the tests that fail without it.

This module does not run them. A test is named as pytest names it, followed by options where it needs some.
"""

from dataclasses import dataclass
from typing import Final

PROTOCOL: Final = "tests/integration/chunks/test_protocol.py"
LAPSES: Final = "tests/integration/chunks/test_lapses.py"
LOCK_ORDER: Final = "tests/integration/chunks/test_lock_order.py"
PAUSES: Final = "tests/integration/chunks/test_pauses.py"
UPLOADS: Final = "tests/integration/jobs/test_uploads.py"
LOST_MESSAGES: Final = "tests/integration/broker/test_lost_messages.py"
ITEMS: Final = "tests/integration/rows/test_items.py"
CANARY: Final = "tests/integration/runs/test_canary.py"
REFERENCES: Final = "tests/integration/objects/test_references.py"
INPUTS: Final = "tests/integration/objects/test_inputs.py"
LEDGER: Final = "tests/unit/chunk/test_key_ledger.py"
OUTPUTS: Final = "tests/integration/objects/test_outputs.py"
VISIBLE: Final = "tests/integration/objects/test_visible_rows.py"
REAL_STORES: Final = "tests/integration/objects/test_real_stores.py"
ICEBERG: Final = "tests/integration/objects/test_iceberg.py"
MENDING: Final = "tests/integration/jobs/test_mending.py"
PROOFS: Final = "tests/integration/engine/test_proofs.py"
CODES: Final = "tests/integration/collections/test_codes.py"
SPARSE_INDEX: Final = "tests/integration/search/test_sparse_index.py"
SEARCH_OUTPUTS: Final = "tests/integration/search/test_search_outputs.py"
CONTRACT: Final = "tests/integration/work/test_contract.py"
ORDER: Final = "tests/integration/collections/test_order_of_writers.py"
PARTITIONS: Final = "tests/integration/jobs/test_partitions.py"
COUNTERS: Final = "tests/integration/chunks/test_counters.py"
COALESCER: Final = "tests/unit/queries/test_coalescer.py"
WAITING: Final = "tests/contract/test_no_waiting.py"
REPRESENTATIONS: Final = "tests/contract/test_representations_agree.py"
ENGINE_OUTPUTS: Final = "tests/integration/engine/test_engine_outputs.py"
STATIC: Final = "tests/contract/test_static_agrees.py"
GLINER: Final = "tests/contract/test_gliner_agrees.py"
EXTRACT_MODEL: Final = "tests/unit/tasks/test_extract_model.py"
TOKENS: Final = "tests/unit/tokens/test_tokens.py"
FILLS: Final = "tests/integration/rows/test_fills.py"
SCRUBBING: Final = "tests/integration/rows/test_scrubbing.py"
RERANKERS: Final = "tests/contract/test_rerankers_agree.py"
ENCODERS: Final = "tests/contract/test_encoder_agrees.py"
REFUSED: Final = "tests/unit/deployment/test_refused_models.py"
UNLOADED: Final = "tests/integration/jobs/test_failing_workers.py"
WORLDS: Final = (
    "tests/integration/interleavings/test_interleavings.py::"
    "test_no_overlap_of_transactions_loses_doubles_or_blocks_anything --first-seed 0 --interleavings 150"
)
FLOODS: Final = "tests/integration/limits/test_trickle_and_flood.py"
REPEATED: Final = "tests/integration/api/test_api_idempotency.py"
CRASHES: Final = "tests/integration/crashes/test_crash_points.py"
WORK: Final = "tests/integration/work/test_contract.py"
BACKLOG: Final = "tests/integration/jobs/test_backlog.py"
PRUNING: Final = "tests/integration/jobs/test_pruning.py"
FREQUENT: Final = (
    "tests/integration/scale/test_frequent_statements.py::"
    "test_what_runs_often_reads_little_among_a_hundred_thousand_open_jobs"
)
QUOTES: Final = "tests/integration/quotes/test_quotes.py"
SAMPLES: Final = "tests/unit/quotes/test_samples.py"
SENDER: Final = "tests/integration/webhooks/test_webhook_sender.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of the product that tests must notice.

    `text`, which occurs once in `file`, becomes `instead`; then each of `tests` must fail.
    """

    name: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]


MUTANTS: Final = (
    Mutant(
        "a dry run of a document makes a job",
        "api/intake/submissions.py",
        "open_any(new_job, resources, intake, is_dry=document.dry_run)",
        "open_any(new_job, resources, intake, is_dry=False)",
        (f"{QUOTES}::test_a_dry_run_counts_what_the_model_reads_and_stores_nothing",),
    ),
    Mutant(
        "a quote waits for the whole of jobs that take turns with its own",
        "vectormill/quotes/quote.py",
        "sum(min(own.value, each) for each in beside)",
        "sum(beside)",
        (f"{SAMPLES}::test_more_urgent_jobs_come_first_and_others_take_turns",),
    ),
    Mutant(
        "a job is quoted as if rows that exist were not encoded",
        "vectormill/quotes/quote.py",
        "kept.rest if kept and skips_kept else 1",
        "kept.rest if kept else 1",
        (f"{QUOTES}::test_rows_that_the_collection_has_are_counted_and_only_a_reindex_leaves_them_out",),
    ),
    Mutant(
        "the commit compares no fence",
        "vectormill/jobs/completion.py",
        "WHERE id = :chunk_id AND fence = :fence AND {IS_LEASED}",
        "WHERE id = :chunk_id AND state = 'leased'",
        (f"{PROTOCOL}::test_a_worker_that_lost_its_lease_writes_nothing", WORLDS),
    ),
    Mutant(
        "the commit asks nothing of the chunk's state",
        "vectormill/jobs/completion.py",
        "WHERE id = :chunk_id AND fence = :fence AND {IS_LEASED}",
        "WHERE id = :chunk_id AND fence = :fence",
        (f"{PROTOCOL}::test_a_worker_that_lost_its_lease_writes_nothing",),
    ),
    Mutant(
        "a chunk is looked up among all leased ones",
        "vectormill/jobs/chunk.py",
        "state || '' = 'leased'",
        "state = 'leased'",
        (
            "tests/integration/chunks/test_chunk_plans.py::"
            "test_a_chunk_under_its_fence_is_found_without_reading_other_leased_chunks",
        ),
    ),
    Mutant(
        "whoever counts a chunk has ended the job",
        "vectormill/jobs/counters.py",
        "RETURNING num_open_chunks = 0 AS is_finished",
        "RETURNING true AS is_finished",
        (f"{PROTOCOL}::test_of_all_commits_of_a_job_exactly_one_is_told_that_it_ended_it",),
    ),
    Mutant(
        "the job's counter returns nothing",
        "vectormill/jobs/counters.py",
        "    RETURNING num_open_chunks = 0 AS is_finished\n",
        "",
        (f"{PROTOCOL}::test_of_all_commits_of_a_job_exactly_one_is_told_that_it_ended_it",),
    ),
    Mutant(
        "every commit locks the row of its job, however many chunks are open",
        "vectormill/jobs/counters.py",
        'f" AND (num_open_chunks <= {_NEAR_END_CHUNKS} OR CAST(:is_turn AS boolean))"',
        '" AND (:is_turn OR true)"',
        (f"{COUNTERS}::test_of_a_large_job_few_commits_change_the_row_and_it_ends_without_a_scheduler",),
    ),
    Mutant(
        "a job is changed without what was noted of it",
        "vectormill/jobs/jobs.py",
        "    add_up_job(connection, job_id)\n",
        "",
        (f"{COUNTERS}::test_a_retry_knows_of_failures_that_were_only_noted",),
    ),
    Mutant(
        "what was noted of a removed job stays",
        "vectormill/jobs/counters.py",
        '            connection.execute(FORGET_REMOVED, {"job_id": job_id})\n',
        "",
        (f"{COUNTERS}::test_what_was_noted_of_a_job_that_was_removed_is_forgotten",),
    ),
    Mutant(
        "the scheduler does not count what was noted",
        "scheduler/main.py",
        "            Duty(_ADD_UP_SECONDS, lambda: add_up_jobs(engine)),\n",
        "",
        (
            "tests/integration/broker/test_scheduler_process.py::"
            "test_a_scheduler_counts_what_commits_have_only_noted",
        ),
    ),
    Mutant(
        "a flush of Redis is not noticed",
        "vectormill/broker/queues.py",
        "return is_lost",
        "return False",
        ("tests/integration/broker/test_flush.py::test_after_a_flush_the_first_look_dispatches_again",),
    ),
    Mutant(
        "an older job overwrites a newer one",
        "vectormill/collections/generation_tables.py",
        "WHERE live.job_seq <= excluded.job_seq  -- an older job never overwrites a newer one",
        "",
        (f"{PROTOCOL}::test_an_older_job_never_overwrites_a_newer_one",),
    ),
    Mutant(
        "rows are written in the order they come in",
        "vectormill/collections/generation_tables.py",
        "ORDER BY item.key ",
        "",
        (
            "tests/integration/placement/test_shared_keys.py::"
            "test_chunks_that_name_the_same_keys_in_other_orders_never_wait_for_each_other",
        ),
    ),
    Mutant(
        "an upload that failed deletes its job even if it was answered",
        "vectormill/jobs/deletion.py",
        "WHERE id = :job_id AND state = 'uploading' AND content_hash IS NULL",
        "WHERE id = :job_id",
        (f"{UPLOADS}::test_a_job_whose_commit_reply_was_lost_is_not_deleted_under_the_client_that_repeats",),
    ),
    Mutant(
        "a job is deleted before its chunks are locked",
        "vectormill/jobs/jobs.py",
        '    connection.execute(LOCK_CHUNKS, {"job_id": job_id})\n',
        "",
        (f"{LOCK_ORDER}::test_the_query_of_a_search_is_removed_while_a_worker_commits_it",),
    ),
    Mutant(
        "a silent upload yields its key even when it is a job already",
        "vectormill/jobs/deletion.py",
        "WHERE idempotency_key = :key AND state = 'uploading'",
        "WHERE idempotency_key = :key",
        (f"{PROTOCOL}::test_a_job_keeps_its_idempotency_key_however_long_nothing_moves_in_it",),
    ),
    Mutant(
        "a part is written although its upload was removed",
        "vectormill/jobs/submission.py",
        'elif connection.execute(GIVE_SIGN_OF_LIFE, {"id": self._id}).one_or_none() is None:',
        'elif connection.execute(GIVE_SIGN_OF_LIFE, {"id": self._id}) is None:',
        (f"{UPLOADS}::test_an_upload_that_was_removed_meanwhile_is_told_so",),
    ),
    Mutant(
        "a lease is not renewed while its chunk is committed",
        "worker/chunk/commit.py",
        "if renew_leases(connection, [claim], self._lease_seconds):\n                    return False\n",
        "pass\n",
        (f"{LAPSES}::test_a_commit_that_a_new_index_blocks_waits_with_its_lease_and_is_then_done",),
    ),
    Mutant(
        "renewal asks for no fence",
        "vectormill/jobs/chunks.py",
        "WHERE chunk.fence = held.fence AND chunk.{IS_LEASED}\n           FOR",
        "WHERE chunk.{IS_LEASED}\n           FOR",
        (f"{PROTOCOL}::test_a_worker_that_lost_its_lease_does_not_renew_its_successors",),
    ),
    Mutant(
        "a claim takes what another worker holds",
        "vectormill/jobs/chunks.py",
        "           AND (state IN {UNCLAIMED_CHUNK_STATES} OR (state = 'leased' AND lease_until < now()))\n",
        "",
        (f"{PROTOCOL}::test_a_duplicate_message_claims_nothing",),
    ),
    Mutant(
        "a claim takes chunks of other models",
        "vectormill/jobs/chunks.py",
        "       AND job.model = :model\n",
        "",
        (f"{PROTOCOL}::test_a_message_that_names_a_chunk_of_another_model_claims_nothing",),
    ),
    Mutant(
        "a claim takes chunks of paused jobs",
        "vectormill/jobs/chunks.py",
        " AND job.state IN {DISPATCHED_JOB_STATES}\n       AND job.model",
        "\n       AND job.model",
        (f"{PAUSES}::test_a_paused_job_dispatches_nothing_and_its_late_messages_claim_nothing",),
    ),
    Mutant(
        "a wish that holds the job waits for chunks",
        "vectormill/jobs/jobs.py",
        "WHERE job_id = :job_id AND state IN {UNCLAIMED_CHUNK_STATES}\n           FOR NO KEY UPDATE SKIP LOCKED",
        "WHERE job_id = :job_id AND state IN {UNCLAIMED_CHUNK_STATES}\n           FOR NO KEY UPDATE",
        (f"{LOCK_ORDER}::test_a_wish_never_waits_for_a_chunk",),
    ),
    Mutant(
        "the reaper takes leases before workers could renew them",
        "scheduler/reaper.py",
        "return 0 if now < self._patient_until else rescue_expired_chunks(connection)",
        "return rescue_expired_chunks(connection)",
        (f"{LAPSES}::test_nothing_is_reaped_before_workers_had_the_time_of_a_lease_to_renew",),
    ),
    Mutant(
        "a new dispatcher trusts the former one's messages",
        "scheduler/dispatcher.py",
        "        self._has_unrung = True\n\n    def recall_lost_messages",
        "        self._has_unrung = False\n\n    def recall_lost_messages",
        (
            f"{LOST_MESSAGES}::test_a_new_dispatcher_rings_at_once_for_what_one_that_died_had_only_marked",
            f"{CRASHES}::test_a_dispatcher_killed_at_any_step_leaves_every_chunk_to_the_next_one",
        ),
    ),
    Mutant(
        "messages are published before the chunks are marked",
        "scheduler/dispatcher.py",
        "            dispatches = mark_queued(connection, [(share.job_id, share.num_chunks) for share in shares])\n",
        "            dispatches = mark_queued(connection, [(share.job_id, share.num_chunks) for share in shares])\n"
        "            publish(self._app, dispatches)\n            dispatches = []\n",
        (f"{CRASHES}::test_a_dispatcher_killed_at_any_step_leaves_every_chunk_to_the_next_one",),
    ),
    Mutant(
        "a commit looks for no tombstone",
        "vectormill/collections/generation_tables.py",
        "     WHERE NOT EXISTS (SELECT 1 FROM newer WHERE newer.key = item.key AND newer.seq > item.place)\n",
        "",
        (
            f"{ITEMS}::test_a_job_submitted_before_a_deletion_does_not_bring_the_key_back_and_a_later_one_does",
            WORLDS,
        ),
    ),
    Mutant(
        "a deletion does not wait for commits",
        "vectormill/collections/items.py",
        "    lock_deletions(connection, generations[0].collection_id)\n",
        "",
        (f"{ITEMS}::test_a_commit_and_a_deletion_that_overlap_leave_nothing_of_the_key",),
    ),
    Mutant(
        "texts are scrubbed while a transaction may still bring an older job",
        "vectormill/collections/deletions.py",
        "AND deleted_at < (SELECT coalesce(min(xact_start), now())",
        "AND now() >= (SELECT coalesce(min(xact_start), now())",
        (f"{SCRUBBING}::test_a_transaction_that_began_before_the_deletion_is_waited_for",),
    ),
    Mutant(
        "a twin takes a place of its own",
        "vectormill/jobs/chunks.py",
        "coalesce(job.place, job.seq) AS job_seq",
        "job.seq AS job_seq",
        (f"{ORDER}::test_a_second_twin_has_the_place_of_its_original",),
    ),
    Mutant(
        "a build carries rows in the place of its run",
        "vectormill/sources/own_texts.py",
        "yield replace(items, places=[places[key] for key in items.keys])",
        "yield items",
        (f"{ORDER}::test_a_job_that_was_queued_when_a_build_from_own_texts_began_is_not_lost",),
    ),
    Mutant(
        "the halves of a split chunk forget the places of their rows",
        "vectormill/jobs/chunk.py",
        "cut_places = (None, None) if places is None else (places[:middle], places[middle:])",
        "cut_places = (None, None)",
        (f"{ORDER}::test_a_chunk_of_carried_rows_that_is_split_keeps_their_places",),
    ),
    Mutant(
        "a limit of Postgres blames no value",
        "vectormill/db/outages.py",
        'VALUE_CLASSES: Final = frozenset({"22", "54"})',
        'VALUE_CLASSES: Final = frozenset({"22"})',
        (
            "tests/integration/runs/test_runs.py::"
            "test_one_text_that_cannot_be_kept_does_not_fail_the_run_that_keeps_the_others",
        ),
    ),
    Mutant(
        "a push that was not heard of loses its parts",
        "vectormill/sources/pushes.py",
        "runs.id = :id AND runs.state = 'failed'",
        "runs.id = :id AND runs.state <> 'queued'",
        (
            "tests/integration/sources/test_pushes.py::"
            "test_a_push_whose_commit_was_not_heard_of_stays_whole_for_the_indexer_that_has_it",
        ),
    ),
    Mutant(
        "a swap asks nothing of its run",
        "indexer/swapping.py",
        "        context.hold(connection)  # first, because a run that was cancelled or lost must change nothing\n",
        "",
        (
            "tests/integration/runs/test_canary.py::"
            "test_a_run_that_was_cancelled_or_lost_since_its_last_look_makes_nothing_live",
        ),
    ),
    Mutant(
        "a swap holds a run that was cancelled",
        "vectormill/runs/runs.py",
        "    if lease.keep(connection) == CANCELLING:\n",
        "    if lease.keep(connection) is None:\n",
        (
            "tests/integration/runs/test_canary.py::"
            "test_a_run_that_was_cancelled_or_lost_since_its_last_look_makes_nothing_live",
        ),
    ),
    Mutant(
        "a worker counts the chunks that it returns in one transaction for all jobs",
        "vectormill/jobs/rescue.py",
        "    for job_id, num_chunks in released:\n        with engine.begin() as connection:\n"
        "            connection.execute",
        "    with engine.begin() as connection:\n        for job_id, num_chunks in sorted(released):\n"
        "            connection.execute",
        (
            "tests/integration/chunks/test_crash_recovery.py::"
            "test_a_worker_that_returns_chunks_of_several_jobs_locks_one_job_at_a_time",
        ),
    ),
    Mutant(
        "a commit asks nothing of what a run has written beside the row",
        "vectormill/collections/generation_tables.py",
        "key = ANY(%(keys)s::text[]) AND job_seq > %(first_place)s::bigint",
        "key = ANY(%(keys)s::text[]) AND job_seq > %(first_place)s::bigint AND false",
        (f"{ORDER}::test_a_row_whose_metadata_alone_a_run_has_changed_is_not_parted_by_an_older_job",),
    ),
    Mutant(
        "a run removes rows while commits go on",
        "vectormill/collections/items.py",
        "    lock_deletions(connection, generation.collection_id)\n",
        "",
        (f"{ORDER}::test_a_commit_that_overlaps_a_run_s_removal_leaves_no_attributes",),
    ),
    Mutant(
        "a removal by a run leaves no tombstone",
        "vectormill/collections/items.py",
        "    bury_keys(connection, generations[0].collection_id, keys, places)\n",
        "",
        (f"{ORDER}::test_a_key_that_a_run_has_removed_is_not_brought_back_by_an_older_job",),
    ),
    Mutant(
        "the canary demands the rows of jobs whose twins are open",
        "vectormill/collections/coverage.py",
        "twin.state NOT IN {FINISHED_JOB_STATES}",
        "false",
        (f"{CANARY}::test_the_rows_of_a_job_that_is_still_running_are_no_failure",),
    ),
    Mutant(
        "words are looked up whatever the cores",
        "worker/tokens/tokenizer.py",
        "if num_free_cores >= LIBRARY_CORES:",
        "if False:",
        (f"{TOKENS}::test_texts_go_whole_to_the_library_where_it_has_cores_of_its_own",),
    ),
    Mutant(
        "nobody tells the tokenizer its cores",
        "worker/engine/engine.py",
        "self._words, device.num_tokenizer_threads)",
        "self._words, 0)",
        (
            "tests/integration/engine/test_engine.py::test_the_cores_that_a_gpu_leaves_decide_how_its_texts_are_tokenized",
        ),
    ),
    Mutant(
        "columns are converted elsewhere and copied",
        "vectormill/vectors/vector_types.py",
        "columns[:, len(header) :].view(kind.wire)[:] = rows",
        "columns[:, len(header) :] = rows.astype(kind.wire).view(np.uint8)",
        ("tests/unit/vectors/test_vector_types.py::test_vectors_are_copied_once_on_their_way_into_a_column",),
    ),
    Mutant(
        "the host waits for a batch's copy to the device",
        "worker/model/cuda_pass.py",
        "return split_inputs(host.to(device, non_blocking=True), [array.shape for array in inputs])",
        "return split_inputs(host.to(device), [array.shape for array in inputs])",
        (
            f"{WAITING}::test_no_extraction_waits_for_the_device_or_reads_what_is_there",
            f"{WAITING}::test_inputs_go_to_a_gpu_in_one_pinned_copy_that_nobody_waits_for",
        ),
    ),
    Mutant(
        "the vectors of a large batch go through the pipe",
        "worker/runner/channel.py",
        "HALF_BYTES: Final = 320 << 20",
        "HALF_BYTES: Final = 64 << 20",
        ("tests/unit/runner/test_channel.py::test_vectors_of_the_largest_batch_of_short_texts_fit_a_block",),
    ),
    Mutant(
        "a twin is given up with the generation of its original",
        "vectormill/jobs/twins.py",
        "AND (former.state = 'building' OR former.live_at IS NOT NULL)\n",
        "\n",
        (f"{ORDER}::test_a_job_outlives_the_generation_that_was_live_when_it_was_submitted",),
    ),
    Mutant(
        "a build encodes again what an open job had written before it",
        "vectormill/collections/swaps.py",
        "        follow_live_jobs(engine, target, with_done=False)\n",
        "        follow_live_jobs(engine, target)\n",
        (f"{ORDER}::test_what_an_open_job_has_written_before_a_build_is_for_its_source_to_tell",),
    ),
    Mutant(
        "a build leaves out the items of an open job that have failed",
        "vectormill/jobs/twins.py",
        "AND failed.chunk_id = chunks.id))",
        "AND false))",
        (f"{ORDER}::test_what_an_open_job_has_written_before_a_build_is_for_its_source_to_tell",),
    ),
    Mutant(
        "jobs are given up while a rollback still carries them",
        "vectormill/jobs/twins.py",
        "generations.live_at IS NULL AND NOT {IS_CARRIED_FROM}\n     UNION",
        "generations.live_at IS NULL\n     UNION",
        (f"{ORDER}::test_a_job_of_a_generation_that_is_given_up_while_a_rollback_carries_it_is_not_lost",),
    ),
    Mutant(
        "a rollback gives no twins to the jobs that are open",
        "indexer/reindexing.py",
        "        add_missing_twins(engine, live, retired_id, twins_since)\n",
        "",
        (
            f"{ORDER}::"
            "test_a_job_that_a_worker_holds_through_a_rollback_is_in_the_generation_that_is_live_again",
        ),
    ),
    Mutant(
        "a generation is dropped while a rollback carries its rows",
        "vectormill/collections/swaps.py",
        "       AND NOT {IS_CARRIED_FROM}\n",
        "",
        (
            "tests/integration/collections/test_rollback.py::"
            "test_the_generation_from_which_a_rollback_carries_rows_stays_until_its_run_has_ended",
        ),
    ),
    Mutant(
        "token ids of another vocabulary are read",
        "vectormill/batches/endpoints.py",
        "if kinds != {str} and not request.token_ids:",
        "if False:",
        (
            "tests/unit/batches/test_request_lines.py::"
            "test_an_input_is_a_text_or_texts_or_token_ids_where_the_line_says_so",
        ),
    ),
    Mutant(
        "a head is left out without a word",
        "vectormill/models/embedders.py",
        "return None if head is not None else CONVENTIONS.get(architecture)",
        "return CONVENTIONS.get(architecture)",
        (f"{REFUSED}::test_a_head_that_would_be_left_out_is_named_and_its_scores_do_not_become_cosines",),
    ),
    Mutant(
        "adapters that nobody chose are left out",
        "vectormill/models/embedders.py",
        "    if files.must_encode:\n        raise UnsupportedModel(refusal)\n",
        "",
        (f"{REFUSED}::test_a_model_with_an_adapter_for_each_task_is_refused_unless_a_pooling_is_given",),
    ),
    Mutant(
        "DeBERTa's relative positions wait for a number from the host",
        "worker/model/masks.py",
        "        code.make_log_bucket_position = make_log_bucket_position",
        "        del code",
        (f"{WAITING}::test_the_buckets_of_relative_positions_are_those_of_transformers",),
    ),
    Mutant(
        "an adapter is merged without its factor",
        "worker/model/adapters.py",
        'pair["B"] @ pair["A"] * adapter.scaling',
        'pair["B"] @ pair["A"]',
        ("tests/contract/test_adapters_agree.py::test_an_adapter_is_merged_as_peft_merges_it",),
    ),
    Mutant(
        "a reranker's score is the logit of one word of two",
        "worker/model/classifiers.py",
        "return logits[:, :1] - logits[:, 1:].sum(dim=1, keepdim=True)",
        "return logits[:, :1]",
        (f"{RERANKERS}::test_qwen3_reranker_agrees_with_the_code_of_its_readme[True-torch]",),
    ),
    Mutant(
        "what follows the document in a template is cut with it",
        "worker/tokens/wording.py",
        "num_behind = (int(differs[0]) if len(differs) else least) if frames[number][1] else 0",
        "num_behind = 0",
        (f"{RERANKERS}::test_a_reranker_of_sentence_transformers_agrees_with_it[two words]",),
    ),
    Mutant(
        "a chat template that changes texts is believed to leave them as they are",
        "vectormill/models/rerankers.py",
        'raise ValueError("its chat template changes the texts of a pair")',
        "return frozenset()",
        (f"{RERANKERS}::test_a_chat_template_that_changes_texts_is_refused",),
    ),
    Mutant(
        "EmbeddingGemma's texts see the padding behind them",
        "worker/model/masks.py",
        "return is_told and find_family(config.model_type).is_causal and looks_back_alone",
        "return is_told and find_family(config.model_type).is_causal",
        (f"{ENCODERS}::test_embedding_gemma_agrees[torch]",),
    ),
    Mutant(
        "padding beyond a window makes no number of a whole text in openvino",
        "worker/model/masks.py",
        "    return mask | (positions == positions.unsqueeze(1))",
        "    return mask",
        (
            "tests/contract/test_openvino_agrees.py::"
            "test_a_text_is_right_beside_one_that_is_longer_by_more_than_the_window",
        ),
    ),
    Mutant(
        "the window of EmbeddingGemma is a token wider on either side",
        "worker/model/packed.py",
        " - find_family(module.config.model_type).counts_itself",
        "",
        (
            "tests/contract/test_packed_agrees.py::"
            "test_every_token_is_what_plain_transformers_makes_of_its_text_alone",
        ),
    ),
    Mutant(
        "a text's last word stands for all of it",
        "vectormill/models/special_tokens.py",
        "if not tokens.suffix:",
        "if False:",
        (
            "tests/unit/tokens/test_special_tokens.py::"
            "test_a_tokenizer_whose_tokens_are_not_known_is_refused_at_submission",
        ),
    ),
    Mutant(
        "parts of one GPU share a model",
        "worker/placement/replicas.py",
        "if parts := find_parts_of_one_card(rooms):",
        "if parts := []:",
        (
            "tests/unit/placement/test_planner.py::"
            "test_parts_of_one_gpu_share_no_model_and_the_reason_is_said",
        ),
    ),
    Mutant(
        "a job fails as soon as its model is not loaded",
        "vectormill/jobs/waiting.py",
        "if not fitting or any(worker.slots or worker.seconds_since_start < seconds for worker in fitting):",
        "if not fitting or any(worker.slots for worker in fitting):",
        (f"{UNLOADED}::test_a_job_fails_only_when_it_and_the_failure_to_load_are_older_than_the_limit",),
    ),
    Mutant(
        "a job fails though another worker has its model",
        "vectormill/jobs/waiting.py",
        "if not fitting or any(worker.slots or worker.seconds_since_start < seconds for worker in fitting):",
        "if not fitting:",
        (f"{UNLOADED}::test_a_job_that_another_worker_may_encode_or_that_nobody_was_started_for_waits_on",),
    ),
    Mutant(
        "pairs of any size are made",
        "vectormill/jobs/item.py",
        "if num_bytes > MAX_PAIRS_BYTES:",
        "if False:",
        (f"{FLOODS}::test_a_query_of_a_megabyte_for_a_thousand_documents_is_refused_unmultiplied",),
    ),
    Mutant(
        "a login may be sent for ever",
        "api/door/admission.py",
        "self._time(receive, LOGIN_SECONDS)",
        "self._time(receive)",
        (f"{FLOODS}::test_a_login_that_is_sent_byte_by_byte_ends_although_it_is_never_silent",),
    ),
    Mutant(
        "what comes while its key is at work is begun beside it",
        "vectormill/coalescer.py",
        "if self._running[key] < self._max_running_of(key)",
        "if True",
        (f"{COALESCER}::test_what_comes_while_its_key_is_at_work_waits_for_the_next_call",),
    ),
    Mutant(
        "the error of one question is told to all that went with it",
        "vectormill/coalescer.py",
        "if len(together) > 1 and self._is_of_one(error):",
        "if False:",
        (f"{COALESCER}::test_an_error_that_may_be_of_one_is_told_to_that_one_alone",),
    ),
    Mutant(
        "an API that others reach reads local files",
        "api/routes/sources.py",
        "    refuse_local(parse_options(source), settings)\n",
        "",
        (
            "tests/integration/api/collections/test_api_sources.py::"
            "test_an_api_that_others_reach_reads_no_files_of_its_own_machine",
        ),
    ),
    Mutant(
        "a push that was sent again leaves a run of its own",
        "vectormill/sources/pushes.py",
        '                    connection.execute(DELETE_UPLOAD, {"id": self.id})\n',
        "                    pass\n",
        (f"{REPEATED}::test_a_repeated_request_answers_what_the_first_has_made[push]",),
    ),
    Mutant(
        "a key with other content answers the first",
        "vectormill/db/idempotency.py",
        "if bytes(kept.content_hash) != content_hash:",
        "if False:",
        (f"{REPEATED}::test_the_same_key_with_another_body_is_refused_and_makes_nothing",),
    ),
    Mutant(
        "a repetition is shown a secret that came after the first",
        "vectormill/webhooks/webhooks.py",
        "WHERE id = :id AND former_secret_until IS NULL",
        "WHERE id = :id",
        (f"{REPEATED}::test_the_secret_of_a_webhook_that_was_rotated_is_not_shown_for_the_key_that_made_it",),
    ),
    Mutant(
        "leased work compares no fence",
        "vectormill/work/work.py",
        'f"id = :key AND fence = :fence AND state',
        'f"id = :key AND state',
        (
            f"{WORK}::test_whoever_lost_the_lease_writes_nothing",
            f"{WORK}::test_a_row_that_is_cancelled_at_any_step_ends_cancelled_or_was_done_before",
        ),
    ),
    Mutant(
        "leased work asks nothing of the row's state",
        "vectormill/work/work.py",
        "AND fence = :fence AND state IN {self.working}",
        "AND fence = :fence",
        (f"{WORK}::test_a_row_that_has_ended_is_claimed_and_written_by_nobody",),
    ),
    Mutant(
        "a claim of leased work counts no attempt",
        "vectormill/work/work.py",
        "= {row}.{self.attempt} + 1",
        "= {row}.{self.attempt}",
        (f"{WORK}::test_what_never_comes_through_is_given_up_with_a_reason",),
    ),
    Mutant(
        "a claim of leased work raises no fence",
        "vectormill/work/work.py",
        'f"fence = {row}.fence + 1"',
        'f"fence = {row}.fence"',
        (f"{WORK}::test_whoever_lost_the_lease_writes_nothing",),
    ),
    Mutant(
        "a claim of leased work asks for no lease",
        "vectormill/work/work.py",
        'f"AND ({row}.lease_until IS NULL OR {row}.lease_until <= now())"',
        '""',
        (f"{WORK}::test_two_claimants_never_hold_one_row",),
    ),
    Mutant(
        "a claim of leased work waits for another's",
        "vectormill/work/work.py",
        "OF {row} SKIP LOCKED",
        "OF {row}",
        (f"{WORK}::test_two_claimants_never_hold_one_row",),
    ),
    Mutant(
        "a heartbeat of leased work waits for a transaction of the work",
        "vectormill/work/work.py",
        "{self._is_ours} FOR NO KEY UPDATE SKIP LOCKED",
        "{self._is_ours} FOR NO KEY UPDATE",
        (f"{WORK}::test_a_renewal_from_beside_the_work_waits_for_no_transaction",),
    ),
    Mutant(
        "a cancellation of leased work leaves it to its holder",
        "vectormill/work/work.py",
        "SET fence = fence + 1, {_FREE}, {sets} WHERE",
        "SET {_FREE}, {sets} WHERE",
        (f"{WORK}::test_a_row_that_is_cancelled_at_any_step_ends_cancelled_or_was_done_before",),
    ),
    Mutant(
        "a process that stops counts what it hands back as an attempt",
        "vectormill/work/work.py",
        "THEN 0 ELSE 1 END",
        "THEN 0 ELSE 0 END",
        (f"{WORK}::test_a_process_that_stops_hands_back_what_it_has_uncounted",),
    ),
    Mutant(
        "leased work that met an error waits for its lease",
        "vectormill/work/loop.py",
        "lease.hand_back(connection, pause_seconds=pause, is_counted=True, error=reason)",
        "pass",
        (f"{WORK}::test_an_error_is_counted_and_the_pause_after_it_doubles",),
    ),
    Mutant(
        "a run that waits goes before that of a rollback",
        "vectormill/runs/runs.py",
        "(NOT other.options ? 'carry_from', other.created_at)",
        "(NOT run.options ? 'carry_from', other.created_at)",
        (
            "tests/integration/collections/test_rollback.py::"
            "test_a_run_that_was_queued_before_a_rollback_waits_until_what_is_newer_was_carried",
        ),
    ),
    Mutant(
        "rows that a rollback carried into a later generation are not carried by the next one",
        "vectormill/collections/swaps.py",
        "AND CAST(options ->> 'carry_to' AS bigint) = generations.id",
        "AND false",
        (
            "tests/integration/collections/test_rollback.py::"
            "test_rows_that_were_carried_into_a_later_generation_are_carried_again_by_the_next_rollback",
        ),
    ),
    Mutant(
        "a rollback carries what is newer than the live generation alone",
        "vectormill/collections/swaps.py",
        "SELECT coalesce(CAST(retired.report ->> 'retired_seq' AS bigint), CAST(",
        "SELECT coalesce(CAST(",
        (
            "tests/integration/collections/test_rollback.py::"
            "test_a_rollback_past_a_generation_that_was_given_up_carries_all_that_is_newer",
        ),
    ),
    Mutant(
        "queries wait until the runner has room for bulk",
        "worker/engine/in_flight.py",
        "if not self.has_room and num_urgent >= URGENT_BATCHES_AHEAD:",
        "if not self.has_room:",
        (
            "tests/unit/engine/test_in_flight.py::"
            "test_urgent_batches_come_on_top_of_a_full_house_of_bulk_but_not_without_end",
        ),
    ),
    Mutant(
        "a batch is queued behind one that takes long",
        "worker/engine/in_flight.py",
        "num_queued = self._is_queued and self._last_seconds < LONGEST_QUEUED_SECONDS",
        "num_queued = self._is_queued",
        (
            "tests/unit/engine/test_in_flight.py::"
            "test_a_device_that_queues_has_one_batch_more_where_batches_are_short",
        ),
    ),
    Mutant(
        "a process that replaces another is compared with itself",
        "worker/engine/in_flight.py",
        "self._expected = self._expected if is_same else []",
        "self._expected = []",
        (f"{PROOFS}::test_a_process_that_replaces_another_is_compared_with_the_first",),
    ),
    Mutant(
        "a proof lets a small drift pass",
        "worker/engine/engine.py",
        "return find_turned(results, expected, least)",
        "return flaw",
        (f"{PROOFS}::test_a_sound_process_gives_proofs_between_batches_and_a_drifting_one_ends_the_engine",),
    ),
    Mutant(
        "a commit does not say in which period its results were computed",
        "vectormill/jobs/completion.py",
        "proof_id = CAST(:proof_id AS bigint)",
        "proof_id = NULL",
        (
            f"{MENDING}::test_exactly_the_chunks_of_the_failed_period_are_encoded_again_and_their_job_ends_again",
        ),
    ),
    Mutant(
        "a job that is repaired counts its results twice",
        "vectormill/jobs/mending.py",
        "num_done = num_done - :num_items",
        "num_done = num_done",
        (
            f"{MENDING}::test_exactly_the_chunks_of_the_failed_period_are_encoded_again_and_their_job_ends_again",
        ),
    ),
    Mutant(
        "the results of a faulty worker are repaired while it may still commit",
        "vectormill/workers/proofs.py",
        "WHERE workers.incarnation = proof.incarnation",
        "WHERE false",
        (f"{MENDING}::test_a_worker_that_may_still_commit_is_waited_for",),
    ),
    Mutant(
        "a sparse weight or a token's vector of another length agrees",
        "vectormill/vectors/representations.py",
        "_measure(weights[:1], weights[1:], by_length=True)",
        "_measure(weights[:1], weights[1:], by_length=False)",
        (
            "tests/unit/vectors/test_representations.py::"
            "test_agreement_sees_direction_length_and_what_is_not_a_number_in_each_output",
            "tests/integration/jobs/test_certificates.py::"
            "test_of_a_sample_every_output_and_every_record_is_compared[many-None]",
        ),
    ),
    Mutant(
        "a suspect chunk is not marked",
        "vectormill/jobs/mending.py",
        "SET is_suspect = true WHERE",
        "SET is_suspect = NULL WHERE",
        (f"{MENDING}::test_chunks_that_cannot_be_encoded_again_are_suspect_and_listed",),
    ),
    Mutant(
        "a suspect chunk is cleared by a retry of its failed items",
        "vectormill/jobs/certificates.py",
        "bool(row.is_suspect or row.failed_at is not None)",
        "bool(row.failed_at is not None)",
        (f"{MENDING}::test_a_suspect_chunk_stays_suspect_when_its_failed_items_are_retried",),
    ),
    Mutant(
        "a query's own places beyond the vocabulary are sent to Postgres",
        "api/routes/searches.py",
        "if place >= dimensions:",
        "if place < 0:",
        (f"{SEARCH_OUTPUTS}::test_vectors_that_cannot_be_compared_are_refused_by_the_number_of_their_query",),
    ),
    Mutant(
        "the index of sparse weights has all rows, and pgvector refuses the longest",
        "indexer/indexing.py",
        'sql.SQL(f" WHERE {IS_INDEXED}" if is_sparse else "")',
        'sql.SQL("")',
        (f"{SPARSE_INDEX}::test_nearly_all_of_the_ten_best_are_found_and_all_of_those_beside_the_index",),
    ),
    Mutant(
        "rows that the index of sparse weights cannot have are not found",
        "vectormill/search/query_vectors.py",
        "parts=(IS_INDEXED, IS_TOO_LONG)",
        "parts=(IS_INDEXED,)",
        (f"{SPARSE_INDEX}::test_nearly_all_of_the_ten_best_are_found_and_all_of_those_beside_the_index",),
    ),
    Mutant(
        "without an index of sparse weights both parts read all rows",
        "vectormill/search/matches.py",
        'if in_parts and "sparse" in statement.values and "sparse" not in reading.by_index:',
        "if False:",
        (f"{SPARSE_INDEX}::test_without_the_index_all_rows_are_read_once_and_a_rebuild_counts_the_others",),
    ),
    Mutant(
        "a ranking by an index of sparse weights that ends early is taken for whole",
        "vectormill/search/matches.py",
        "min((found[name] for name in reading.by_index), default=None)",
        'min((found[name] for name in reading.by_index - {"sparse"}), default=None)',
        (f"{SPARSE_INDEX}::test_a_query_of_rare_words_is_repeated_by_its_weights_alone",),
    ),
    Mutant(
        "an edited certificate is believed",
        "worker/certificates/certificate.py",
        "if digest != digest_content(",
        "if False and digest != digest_content(",
        ("tests/unit/certificates/test_certificates.py::test_an_edited_certificate_is_refused",),
    ),
    Mutant(
        "what comes behind a wrong answer to the known text is believed",
        "worker/engine/in_flight.py",
        "return bool(self.num_due or self.numbers or self.flaw)",
        "return bool(self.num_due or self.numbers)",
        (
            "tests/unit/engine/test_in_flight.py::"
            "test_what_comes_behind_a_wrong_answer_to_the_known_text_is_not_delivered",
        ),
    ),
    Mutant(
        "a key opens whatever it asks for",
        "api/door/keys.py",
        "if not includes(key.scope, needed):",
        "if False:",
        (
            "tests/integration/api/test_api_keys.py::test_a_key_opens_what_its_scope_says_and_names_the_one_that_is_missing",
        ),
    ),
    Mutant(
        "an expired key opens",
        "vectormill/keys/api_keys.py",
        "coalesce(expires_at <= now(), false) AS is_expired",
        "false AS is_expired",
        ("tests/integration/api/test_api_keys.py::test_a_revoked_or_expired_key_opens_nothing_any_more",),
    ),
    Mutant(
        "any Host is answered",
        "api/door/hosts.py",
        "if not allowed.allow(host):",
        "if False:",
        ("tests/integration/api/test_api_keys.py::test_a_name_that_a_page_made_point_here_is_refused",),
    ),
    Mutant(
        "a page of another site may write",
        "api/door/hosts.py",
        'if origin is None or scope["method"] in SAFE_METHODS or allowed.allow(name_of(origin)):',
        "if True:",
        (
            "tests/integration/api/test_api_keys.py::test_a_page_of_another_site_changes_nothing_by_a_key_in_such_a_header",
        ),
    ),
    Mutant(
        "a webhook may reach a private address",
        "vectormill/webhooks/targets.py",
        "if address.is_global or allows_private:",
        "if True:",
        (
            "tests/unit/webhooks/test_posting.py::test_a_private_address_is_not_connected_to_unless_it_is_allowed",
        ),
    ),
    Mutant(
        "a gate lets in more than its limit",
        "api/limits/gates.py",
        "if self.inside + amount > self._limit.value:",
        "if False:",
        (
            "tests/integration/api/test_api_limits.py::test_more_submissions_at_once_than_allowed_are_asked_to_come_again",
        ),
    ),
    Mutant(
        "a gzip body may become as large as it likes",
        "api/streams/inflater.py",
        "if self._num_given > max(FREE_BYTES, self._num_received * self._max_ratio.value):",
        "if False:",
        (
            "tests/unit/api/test_api_ndjson.py::test_a_body_that_becomes_a_thousand_times_as_large_is_refused_before_it_is_unpacked",
        ),
    ),
    Mutant(
        "a suspect chunk is encoded beside others",
        "worker/chunk/leases.py",
        "while is_suspect and self._num_inside:",
        "while False:",
        ("tests/unit/chunk/test_leases.py::test_a_suspect_waits_until_it_is_alone_and_nobody_joins_it",),
    ),
    Mutant(
        "nobody waits behind a suspect chunk",
        "worker/chunk/leases.py",
        "self._is_closed = is_suspect\n",
        "self._is_closed = False\n",
        ("tests/unit/chunk/test_leases.py::test_a_suspect_waits_until_it_is_alone_and_nobody_joins_it",),
    ),
    Mutant(
        "a digest knows nothing of the prompt",
        "worker/engine/reuse.py",
        "np.uint64(mark) ^ ~self._keys",
        "np.uint64(0) ^ ~self._keys",
        ("tests/unit/engine/test_reuse.py::test_equal_tokens_are_one_sequence_and_anything_else_is_another",),
    ),
    Mutant(
        "a request for several outputs gets a vector",
        "worker/engine/request_queue.py",
        "if self._dimension is not None and not constants.get(OUTPUTS):",
        "if self._dimension is not None:",
        (f"{ENGINE_OUTPUTS}::test_requests_that_ask_for_different_outputs_share_batches",),
    ),
    Mutant(
        "a head reads the states of other sequences",
        "worker/encoder/outputs.py",
        "starts[wants[name]] + num_skipped - before",
        "starts[: wants[name].sum()] + num_skipped - before",
        (
            "tests/unit/tasks/test_represent.py::test_a_batch_of_different_wishes_gives_each_sequence_what_it_asks_for",
        ),
    ),
    Mutant(
        "another head is the same revision",
        "vectormill/models/weights.py",
        "return [*weights, *inner, *heads]",
        "return [*weights, *inner]",
        ("tests/unit/deployment/test_heads.py::test_another_head_is_another_revision",),
    ),
    Mutant(
        "a wrong sparse weight is no flaw",
        "worker/tasks/represent.py",
        "if change > LARGEST_CHANGE * largest else",
        "if change > largest else",
        (
            "tests/unit/tasks/test_represent.py::"
            "test_a_changed_output_of_a_canary_is_a_flaw_unless_rounding_explains_it",
        ),
    ),
    Mutant(
        "tokens attend to those that fill up a query",
        "worker/encoder/padding.py",
        "if unattended is not None:",
        "if False:",
        (f"{REPRESENTATIONS}::test_colbert_agrees_with_its_authors[stanford-write_stanford_colbert]",),
    ),
    Mutant(
        "the largest weight of a word is that of the last block",
        "worker/model/heads.py",
        "torch.maximum(total, logits.amax(dim=0).float(), out=total)",
        "total.copy_(logits.amax(dim=0))",
        (f"{REPRESENTATIONS}::test_splade_agrees_with_sentence_transformers[Bert-torch]",),
    ),
    Mutant(
        "documents keep the vectors of the skiplist",
        "worker/tasks/represent.py",
        "vectors = vectors[~np.isin(ids[count_skipped(card) :], head.skiplist)]",
        "pass",
        (
            "tests/unit/tasks/test_represent.py::test_documents_lose_the_vectors_of_the_skiplist_and_queries_keep_them",
        ),
    ),
    Mutant(
        "the mean counts padding",
        "worker/model/pooling.py",
        "return (states * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=SMALLEST_WEIGHT)",
        "return states.mean(dim=1)",
        ("tests/unit/model/test_pooling.py::test_pooling_packed_sequences_is_pooling_padded_ones",),
    ),
    Mutant(
        "int8 codes wrap around beyond the ranges",
        "vectormill/vectors/quantization.py",
        "(np.clip(steps, 0, NUM_STEPS) + SMALLEST_CODE)",
        "(steps + SMALLEST_CODE)",
        (
            "tests/unit/vectors/test_vector_types.py::test_codes_are_those_of_sentence_transformers_for_the_same_ranges",
        ),
    ),
    Mutant(
        "windows of a long text do not overlap",
        "worker/tokens/passages.py",
        "stride = room - overlap",
        "stride = room",
        (
            "tests/unit/tokens/test_passages.py::test_windows_cover_every_token_once_by_weight_and_overlap_as_asked",
        ),
    ),
    Mutant(
        "no number of urgent jobs lets an old one through",
        "scheduler/dispatcher.py",
        "if self._clock() >= self._aged_due:",
        "if False:",
        (
            "tests/integration/chunks/test_dispatch.py::test_no_number_of_urgent_jobs_hides_one_that_has_waited_for_long",
        ),
    ),
    Mutant(
        "a run that would change nearly all of a collection is not held",
        "vectormill/runs/run.py",
        "if num_rows == 0 or num_changed + num_vanished <= max_share * num_rows:",
        "if True:",
        ("tests/unit/domain/test_run.py::test_a_share_of_a_collection_may_change_unasked",),
    ),
    Mutant(
        "a page of the console needs no CSRF token",
        "api/console/guard.py",
        "if headers.get(CSRF_HEADER) != token:",
        "if False:",
        (
            "tests/integration/console/test_console_door.py::test_nothing_is_pressed_without_the_token_of_the_own_page",
        ),
    ),
    Mutant(
        "an export that lost its job looks whole",
        "vectormill/jobs/export.py",
        '    if not blocks:\n        raise JobNotFound(\n            f"Job {job.id} was removed while its vectors',
        '    if False:\n        raise JobNotFound(\n            f"Job {job.id} was removed while its vectors',
        (
            "tests/integration/rows/test_export_cut.py::test_a_job_that_is_removed_before_the_first_block_is_not_found",
        ),
    ),
    Mutant(
        "a second line with a custom_id is answered too",
        "vectormill/batches/validation.py",
        "is_repeated = place == next_repeated",
        "is_repeated = False",
        (
            "tests/integration/batches/test_batches.py::test_a_line_that_is_wrong_is_told_of_in_the_error_file_and_takes_no_other_with_it",
        ),
    ),
    Mutant(
        "a key that was revoked opens",
        "vectormill/keys/api_keys.py",
        '      FROM vectormill.api_keys WHERE revoked_at IS NULL\n""")\n\n\n',
        '      FROM vectormill.api_keys\n""")\n\n\n',
        ("tests/integration/api/test_api_keys.py::test_a_revoked_or_expired_key_opens_nothing_any_more",),
    ),
    Mutant(
        "a due time begins two runs",
        "vectormill/schedules/schedules.py",
        "AND schedules.paused_at IS NULL AND schedules.next_due_at <= now()",
        "AND schedules.paused_at IS NULL",
        (
            "tests/integration/runs/test_schedules.py::test_three_schedulers_at_once_make_one_run_for_each_due_time",
        ),
    ),
    Mutant(
        "an index gives too few rows of a filtered search",
        "vectormill/search/matches.py",
        "set_config('hnsw.iterative_scan', 'relaxed_order', true)",
        "set_config('hnsw.iterative_scan', 'off', true)",
        (
            "tests/integration/search/test_matches.py::test_every_document_gives_its_best_passage_and_there_are_as_many_as_were_asked_for",
        ),
    ),
    Mutant(
        "a job past its retention stays",
        "vectormill/jobs/deletion.py",
        "WHERE finished_at < now() - make_interval(secs => :retention) AND state <> 'deleting'",
        "WHERE false AND finished_at < now() - make_interval(secs => :retention)",
        (
            "tests/integration/jobs/test_pruning.py::test_ended_jobs_are_removed_when_their_retention_is_over_and_others_stay",
        ),
    ),
    Mutant(
        "bits are set for negative numbers",
        "vectormill/vectors/quantization.py",
        "np.packbits(vectors > 0, axis=-1)",
        "np.packbits(vectors < 0, axis=-1)",
        (
            "tests/unit/vectors/test_vector_types.py::test_packed_signs_are_the_ubinary_of_sentence_transformers",
        ),
    ),
    Mutant(
        "the last token is that of the padding",
        "worker/model/pooling.py",
        "is_last = (places == places.amax(dim=1, keepdim=True)) & (mask > 0)",
        "is_last = places == positions.max()",
        ("tests/unit/model/test_pooling.py::test_pooling_packed_sequences_is_pooling_padded_ones",),
    ),
    Mutant(
        "a session of the console outlives its key",
        "api/console/guard.py",
        "if keys and key is None:",
        "if False:",
        (
            "tests/integration/console/test_console_door.py::test_once_a_key_exists_no_route_of_the_console_is_open_but_its_login_and_its_assets",
        ),
    ),
    Mutant(
        "a sequence is known by one half of its digest",
        "worker/engine/reuse.py",
        "is_it = (self._digests[found, 1] == digests[rows, 1]) & (self._used_at[found] > 0)",
        "is_it = self._used_at[found] > 0",
        ("tests/unit/engine/test_reuse.py::test_a_sequence_is_known_by_both_halves_of_its_digest",),
    ),
    Mutant(
        "the pruner takes the jobs of batches that are at work",
        "vectormill/jobs/deletion.py",
        "AND (batch.finished_at IS NULL\n                       OR EXISTS",
        "AND (false\n                       OR EXISTS",
        ("tests/integration/batches/test_batches.py::test_the_job_of_a_batch_stays_as_long_as_its_answers",),
    ),
    Mutant(
        "a schedule that is paused runs",
        "vectormill/schedules/schedules.py",
        "AND schedules.paused_at IS NULL AND schedules.next_due_at <= now()",
        "AND schedules.next_due_at <= now()",
        (
            "tests/integration/runs/test_schedules.py::test_a_schedule_that_is_paused_after_it_was_found_due_makes_no_run",
        ),
    ),
    Mutant(
        "token ids that are cut are not counted",
        "worker/tokens/tokenizer.py",
        "return TokenizedTexts(fitted.inputs, fitted.truncated, {**fitted.failures, **unread})",
        "return TokenizedTexts(fitted.inputs, fitted.truncated & False, {**fitted.failures, **unread})",
        (
            "tests/unit/tokens/test_tokens.py::test_token_ids_of_a_client_that_are_too_many_are_cut_and_counted_or_fail",
        ),
    ),
    Mutant(
        "an object is read whatever its tag is by now",
        "vectormill/objects/store.py",
        'options={"range": (start, end), "if_match": tag}',
        'options={"range": (start, end)}',
        (f"{REFERENCES}::test_an_object_that_was_changed_or_removed_is_never_read[file-False-jsonl]",),
    ),
    Mutant(
        "the halves of a split reference begin at the same row",
        "vectormill/objects/reference.py",
        "skip=self.skip + start",
        "skip=self.skip",
        (
            f"{REFERENCES}::test_halves_of_a_payload_have_the_rows_of_the_whole_without_reading_it[file-jsonl]",
        ),
    ),
    Mutant(
        "rows that share no word with a sparse query are found",
        "vectormill/search/query_vectors.py",
        'conditions=(f"({SPARSE_DISTANCE}) < 0",),',
        "conditions=(),",
        (f"{SEARCH_OUTPUTS}::test_by_sparse_weights_the_largest_inner_products_come_first",),
    ),
    Mutant(
        "MaxSim counts the best token of a query alone",
        "vectormill/search/late_interaction.py",
        "axis=0).sum(axis=1)",
        "axis=0).max(axis=1)",
        (f"{SEARCH_OUTPUTS}::test_multi_vectors_alone_compare_every_row[100]",),
    ),
    Mutant(
        "a later codebook takes the place of that by which rows were written",
        "vectormill/collections/codebooks.py",
        "    ON CONFLICT (fingerprint) DO NOTHING",
        "    ON CONFLICT (fingerprint) DO UPDATE SET digest = excluded.digest, content = excluded.content",
        (f"{CODES}::test_a_codebook_is_measured_once_for_a_space",),
    ),
    Mutant(
        "codes of an earlier text count although a process without codes wrote halves",
        "vectormill/collections/row_kinds.py",
        "        if halves is not None:",
        "        if codes is None and halves is not None:",
        (f"{CODES}::test_halves_of_a_process_without_codes_count_and_it_cannot_lose_codes",),
    ),
    Mutant(
        "a run waits for rows that a commit is writing",
        "vectormill/collections/codebooks.py",
        "FOR UPDATE SKIP LOCKED",
        "FOR UPDATE",
        (f"{CODES}::test_a_row_that_somebody_writes_is_not_waited_for",),
    ),
    Mutant(
        "codes are restored by whatever codebook there is",
        "vectormill/vectors/residual_codes.py",
        "if codebook is None or codes[:DIGEST_BYTES] != codebook.digest:",
        "if codebook is None:",
        (
            "tests/unit/vectors/test_residual_codes.py::test_codes_of_another_codebook_are_refused",
            f"{CODES}::test_codes_without_their_codebook_are_an_error_that_says_so[another]",
        ),
    ),
    Mutant(
        "a tile has as many rows as a batch has texts of its length",
        "worker/encoder/reproducible.py",
        "num_rows = count_tile_rows(TILE_TOKENS, length)\n            for",
        "num_rows = len(places)\n            for",
        (
            "tests/contract/test_reproducible.py::"
            "test_tiles_have_one_shape_and_a_model_for_which_that_is_not_enough_is_refused",
        ),
    ),
    Mutant(
        "a view keeps the columns of outputs that its generation lacks",
        "vectormill/collections/views.py",
        "[name for name in OUTPUT_COLUMNS.values() if name not in kept] if is_shown else []",
        "[]",
        (
            "tests/integration/collections/test_representations.py::"
            "test_a_collection_gets_more_outputs_by_a_build",
        ),
    ),
    Mutant(
        "a part counts although its chunk's fence has moved on",
        "vectormill/jobs/completion.py",
        "        _end_under_fence(connection, claim, DONE, outcome.proof_id)\n        record(connection)",
        "        record(connection)",
        (f"{CONTRACT}::test_whoever_lost_the_lease_writes_nothing[ChunksToStorage]",),
    ),
    Mutant(
        "the sweep takes parts that are young",
        "vectormill/objects/closing.py",
        "if each.modified_at > before:",
        "if False:",
        (f"{OUTPUTS}::test_results_whose_commit_never_came_do_not_count_and_are_swept[file]",),
    ),
    Mutant(
        "the sweep takes parts that count",
        "vectormill/objects/closing.py",
        "unknown = sorted(set(names) - set(connection.execute(FIND_KNOWN, values).scalars()))",
        "unknown = sorted(set(names))",
        (f"{OUTPUTS}::test_results_whose_commit_never_came_do_not_count_and_are_swept[file]",),
    ),
    Mutant(
        "two jobs write into one folder",
        "vectormill/objects/output.py",
        "if is_taken:",
        "if False:",
        (f"{OUTPUTS}::test_two_jobs_never_share_a_folder_and_a_failed_submission_leaves_none_behind[file]",),
    ),
    Mutant(
        "a closing that is repeated adds its parts to the table again",
        "vectormill/objects/iceberg.py",
        "snapshot.summary[JOB_PROPERTY] == str(job_id)",
        "snapshot.summary[JOB_PROPERTY] == job_id",
        (
            f"{ICEBERG}::test_a_kill_after_the_commit_of_the_table_adds_nothing_twice -m slow",
            f"{ICEBERG}::test_a_retry_adds_only_what_failed_before[sqlite-killed] -m slow",
        ),
    ),
    Mutant(
        "a commit that another has overtaken is repeated on top of it",
        "vectormill/objects/iceberg.py",
        'table.metadata.properties[TableProperties.COMMIT_NUM_RETRIES] = "0"',
        "pass",
        (f"{ICEBERG}::test_whoever_is_overtaken_by_another_commit_looks_again_what_is_missing -m slow",),
    ),
    Mutant(
        "a retry adds all parts to the table once more when their snapshot is forgotten",
        "vectormill/objects/closing.py",
        "for part in parts if part.name not in former]",
        "for part in parts]",
        (f"{ICEBERG}::test_a_retry_adds_only_what_failed_before[sqlite-compacted] -m slow",),
    ),
    Mutant(
        "the parts of a table have neither its field ids nor its types",
        "vectormill/objects/parts.py",
        "if claim.output_schema is not None:",
        "if False:",
        (f"{ICEBERG}::test_a_table_has_the_values_that_the_parts_have[sqlite-vectors] -m slow",),
    ),
    Mutant(
        "a part that was begun by a process which is gone is planned anew",
        "vectormill/objects/closing.py",
        "    if planned:\n        yield planned",
        "    pass",
        (f"{VISIBLE}::test_a_closing_that_is_interrupted_at_any_moment_shows_no_row_twice[file-3] -m tail",),
    ),
    Mutant(
        "parts that count nowhere are left where readers see them",
        "vectormill/objects/closing.py",
        "    _remove_unknown(held, (PREFIX,), before=math.inf)",
        "    pass",
        (
            f"{OUTPUTS}::test_an_output_that_an_older_release_has_begun_has_each_row_once_when_it_is_closed[file]",
        ),
    ),
    Mutant(
        "the sweep leaves the manifest of a process that had lost its lease",
        "vectormill/objects/closing.py",
        "    _write_manifest(held, list(_list_parts(held)))",
        "    pass",
        (f"{VISIBLE}::test_a_closing_that_is_interrupted_at_any_moment_shows_no_row_twice[file-3] -m tail",),
    ),
    Mutant(
        "the same object of Azure has another entity tag in a list",
        "vectormill/objects/store.py",
        'if url.startswith("az://"):',
        "if False:",
        (f"{REAL_STORES}::test_a_job_goes_from_a_store_into_a_store_and_leaves_nothing_over[azure] -m slow",),
    ),
    Mutant(
        "a local folder is written wherever a link leads",
        "vectormill/objects/store.py",
        "if not path.resolve().is_relative_to(start):",
        "if not path.is_relative_to(start):",
        (f"{REFERENCES}::test_addresses_are_normalized_and_local_ones_stay_below_their_root",),
    ),
    Mutant(
        "a store that is away counts as an attempt of the chunk",
        "worker/chunk/chunk_encoder.py",
        "self._release(claim, str(error), is_counted=False, delay=_STORAGE_SECONDS)",
        "self._release(claim, str(error), is_counted=True, delay=_STORAGE_SECONDS)",
        (
            f"{OUTPUTS}::test_a_store_that_refuses_holds_its_chunks_back_and_says_so_until_it_is_well[PUT-403]",
        ),
    ),
    Mutant(
        "keys whose hashes are equal are taken for equal",
        "vectormill/jobs/key_ledger.py",
        "if read_key(earlier) == key:",
        "if True:",
        (f"{LEDGER}::test_different_keys_with_one_hash_are_told_apart_by_reading_them",),
    ),
    Mutant(
        "runs behind the first duplicate are sorted too",
        "vectormill/jobs/key_ledger.py",
        "                    break\n            for share",
        "                    pass\n            for share",
        (f"{LEDGER}::test_a_key_that_is_everywhere_fills_no_memory_and_whoever_waits_is_told_of_progress",),
    ),
    Mutant(
        "a run takes a collision of hashes for a duplicate",
        "indexer/reindexing.py",
        "if duplicate is not None and has_repeated_key(connection, stage):",
        "if duplicate is not None:",
        ("tests/integration/runs/test_runs.py::test_two_keys_with_one_hash_are_no_duplicate",),
    ),
    Mutant(
        "a repetition that asks for unique keys is answered by a job that did not",
        "vectormill/objects/submission.py",
        "writer.add_content(msgspec.json.encode(wanted))",
        "pass",
        (
            "tests/integration/objects/test_api_objects.py::"
            "test_keys_that_repeat_are_refused_where_asked_by_both_their_places",
        ),
    ),
    Mutant(
        "objects that are read once more add their chunks to those of the first reading",
        "vectormill/objects/submission.py",
        """    try:
        _delete_chunks(held)
""",
        """    try:
""",
        (
            f"{INPUTS}::test_whatever_a_request_has_read_when_its_time_is_over_no_chunk_is_there_twice",
            f"{WORK}::test_a_process_killed_at_any_step_leaves_a_row_that_another_brings_to_its_end[Inputs]",
        ),
    ),
    Mutant(
        "a job whose objects wait for an indexer is removed as a silent upload",
        "vectormill/jobs/deletion.py",
        "WHERE state = 'uploading' AND content_hash IS NULL AND updated_at",
        "WHERE state = 'uploading' AND updated_at",
        (f"{INPUTS}::test_objects_that_take_long_are_read_by_an_indexer_into_the_job_that_the_answer_named",),
    ),
    Mutant(
        "a job that was left to an indexer is removed when only the reply to its COMMIT was lost",
        "vectormill/jobs/deletion.py",
        "WHERE id = :job_id AND state = 'uploading' AND content_hash IS NULL",
        "WHERE id = :job_id AND state = 'uploading'",
        (f"{INPUTS}::test_a_job_left_to_an_indexer_survives_the_loss_of_its_commit_s_reply[True]",),
    ),
    Mutant(
        "one changed row reads the whole generation",
        "vectormill/runs/differences.py",
        "if num_pages <= PAGES_PER_TEXT * num_wanted else",
        "if True else",
        (
            "tests/integration/runs/test_run_plans.py::"
            "test_few_changes_find_their_vectors_without_reading_the_generation",
        ),
    ),
    Mutant(
        "the counts of open jobs do not follow progress",
        "alembic/versions/0029_open_jobs.py",
        "CREATE TRIGGER count_changed_job AFTER UPDATE ON",
        "CREATE TRIGGER count_changed_job AFTER UPDATE OF state ON",
        (f"{BACKLOG}::test_a_large_job_changes_the_counts_rarely_and_is_never_counted_too_small",),
    ),
    Mutant(
        "the counts of open jobs leave out jobs that are retried",
        "alembic/versions/0029_open_jobs.py",
        "WHEN ((OLD.state IN {_OPEN} OR NEW.state IN {_OPEN})",
        "WHEN ((OLD.state IN {_OPEN})",
        (f"{BACKLOG}::test_a_job_that_is_retried_is_counted_again",),
    ),
    Mutant(
        "counts that are added up change",
        "vectormill/jobs/backlog.py",
        "SELECT model, state, priority, generation_id, sum(num_jobs), sum(num_items), sum(num_chunks) FROM counted",
        "SELECT model, state, priority, NULL, sum(num_jobs), sum(num_items), max(num_chunks) FROM counted",
        (f"{BACKLOG}::test_added_up_counts_are_the_same_and_few",),
    ),
    Mutant(
        "the limit of pending items reads all open jobs",
        "vectormill/jobs/backlog.py",
        "SELECT CAST(coalesce(sum(num_items), 0) AS bigint) FROM vectormill.open_job_counts",
        "SELECT CAST(coalesce(sum(num_items), 0) AS bigint) FROM vectormill.jobs WHERE finished_at IS NULL",
        (f"{FREQUENT}[serve] -m tail",),
    ),
    Mutant(
        "paused jobs stand before those that the dispatcher looks for",
        "alembic/versions/0029_open_jobs.py",
        "(model, priority, seq) WHERE state IN ('queued', 'running')",
        "(model, priority, seq) WHERE state IN {_OPEN}",
        (f"{FREQUENT}[dispatch] -m tail",),
    ),
    Mutant(
        "the maintainer reads all runs for those of a collection",
        "alembic/versions/0029_open_jobs.py",
        "ON vectormill.runs (collection_id, finished_at) WHERE kind = 'index'",
        "ON vectormill.runs (finished_at, collection_id) WHERE kind = 'check'",
        (f"{FREQUENT}[keep_house] -m tail",),
    ),
    Mutant(
        "a large job is removed to its end before the next",
        "scheduler/pruner.py",
        "self._last_seq = job.seq",
        "self._last_seq = 0",
        (f"{PRUNING}::test_a_small_job_is_removed_before_a_large_one_that_was_deleted_earlier",),
    ),
    Mutant(
        "an error of one duty of the pruner ends the round",
        "scheduler/pruner.py",
        "if is_outage(error):",
        "if True:",
        (f"{PRUNING}::test_an_error_of_one_duty_takes_no_turn_from_the_others",),
    ),
    Mutant(
        "a row that was inserted behind its page is deleted",
        "indexer/reindexing.py",
        "return [key for key in keys if key not in present]",
        "return keys",
        (
            "tests/integration/runs/test_followed_sources.py::"
            "test_a_row_that_no_page_had_is_deleted_only_if_the_source_does_not_have_it",
        ),
    ),
    Mutant(
        "a query of a source ends the read-only transaction and writes",
        "vectormill/sources/sql.py",
        "driver.execute(query.encode(), binary=True)",
        "driver.execute(query.encode())",
        (
            "tests/integration/sources/test_source_readers.py::"
            "test_no_way_of_asking_a_query_runs_a_second_statement",
        ),
    ),
    Mutant(
        "different pairs with the same question are quoted as repeated",
        "vectormill/sources/sql.py",
        "for name in self._options.texts]",
        "for name in self._options.texts[:1]]",
        (
            "tests/integration/sources/test_source_readers.py::"
            "test_pairs_that_share_their_first_text_are_counted_as_different",
        ),
    ),
    Mutant(
        "a part of CSV that begins within quotes is read with the quotes reversed",
        "vectormill/quotes/objects.py",
        "bool(start and header) and _begins_within_quotes(content, format, len(header))",
        "False",
        (f"{QUOTES}::test_parts_begin_within_quotes_and_rows_are_longer_than_a_part",),
    ),
    Mutant(
        "dry runs of objects take any number of threads",
        "api/intake/submissions.py",
        "from_thread.run_sync(quoting.take, 1)",
        "pass",
        (
            "tests/integration/api/test_api_limits.py::"
            "test_more_quotes_that_read_for_long_than_allowed_are_asked_to_come_again",
        ),
    ),
    Mutant(
        "a dry run reads small objects for as long as there are any",
        "vectormill/quotes/objects.py",
        "if len(ends) > NUM_PARTS and time.monotonic() >= until:",
        "if False:",
        (f"{QUOTES}::test_of_many_small_objects_those_are_read_for_which_there_is_time",),
    ),
    Mutant(
        "a dry run of large objects does not compare their rows with the limit of a job",
        "api/intake/submissions.py",
        "intake.take_items(int(rows.value))",
        "pass",
        (f"{QUOTES}::test_a_dry_run_of_large_objects_refuses_too_many_rows_where_their_number_is_known",),
    ),
    Mutant(
        "a sample keeps whole texts",
        "vectormill/quotes/sample.py",
        "item.text[:KEPT_BYTES]",
        "item.text",
        (f"{SAMPLES}::test_of_long_texts_only_the_beginning_is_kept_with_their_length_and_hash",),
    ),
    Mutant(
        "the first texts of a sample are counted instead of random ones",
        "vectormill/quotes/token_counts.py",
        "np.random.default_rng(0).permutation(len(rows))",
        "range(len(rows))",
        (f"{SAMPLES}::test_of_texts_in_the_order_of_their_length_random_ones_are_counted",),
    ),
    Mutant(
        "a row group of equal texts is kept, however large it is in memory",
        "vectormill/objects/reference.py",
        "num_bytes += batch.nbytes",
        "num_bytes += 0",
        (
            "tests/integration/objects/test_references.py::"
            "test_a_row_group_is_decoded_once_and_one_that_is_too_large_is_streamed",
        ),
    ),
    Mutant(
        "rows of a small row group are counted several times",
        "vectormill/quotes/objects.py",
        "for part in parts if (each.url, part.row_group, part.skip) not in blocks]",
        "for part in parts]",
        (f"{QUOTES}::test_of_one_large_row_group_rows_of_all_its_parts_are_read_each_once",),
    ),
    Mutant(
        "a run of the release before is not recognized when its request is repeated",
        "api/routes/runs.py",
        'msgspec.json.encode({"kind": body.kind, "options": body.options})',
        "msgspec.json.encode(body)",
        (
            "tests/integration/api/test_api_idempotency.py::"
            "test_a_run_that_was_started_before_dry_runs_existed_is_recognized",
        ),
    ),
    Mutant(
        "rows that are longer than a part are not counted",
        "vectormill/quotes/objects.py",
        "for part_bytes in (PART_BYTES, 2 * settings.max_line_bytes):",
        "for part_bytes in (PART_BYTES,):",
        (f"{QUOTES}::test_parts_begin_within_quotes_and_rows_are_longer_than_a_part",),
    ),
    Mutant(
        "a key that lies on two pages is not found",
        "vectormill/sources/sql.py",
        "if num_known > 1:",
        "if False:",
        ("tests/integration/sources/test_source_readers.py::test_pages_refuse_what_one_reading_refuses",),
    ),
    Mutant(
        "rows without a key are on no page",
        "vectormill/sources/sql.py",
        "yield columns, rows  # which is refused",
        "pass  # which is refused",
        ("tests/integration/sources/test_source_readers.py::test_pages_refuse_what_one_reading_refuses",),
    ),
    Mutant(
        "whoever wakes the dispatcher ends its rest",
        "scheduler/main.py",
        "        stop.wait(rest_seconds)",
        "        pass",
        (
            "tests/integration/broker/test_doorbell.py::"
            "test_a_submission_wakes_nobody_who_rests_after_a_long_round_and_everybody_afterwards",
        ),
    ),
    Mutant(
        "each poll of a running job reads all chunks in flight",
        "vectormill/jobs/waiting.py",
        "if held.issuperset(job.id for job in jobs):",
        "if False:",
        (
            "tests/integration/jobs/test_waiting.py::"
            "test_a_job_of_which_a_worker_has_a_chunk_is_explained_without_reading_what_others_have",
        ),
    ),
    Mutant(
        "a source without an index is sorted once a page",
        "vectormill/sources/sql.py",
        "if max(sorted_rows, default=0) > MOST_SORTED_ROWS:",
        "if False:",
        (
            "tests/integration/sources/test_source_readers.py::"
            "test_a_query_that_would_be_sorted_for_each_page_is_refused",
        ),
    ),
    Mutant(
        "each waiting client reads all chunks in flight",
        "vectormill/jobs/waiting.py",
        "        if now < until:",
        "        if False:",
        (
            "tests/integration/jobs/test_waiting.py::test_a_large_answer_is_shared_for_a_second_and_a_small_one_is_not",
        ),
    ),
    Mutant(
        "an answer is kept for ever",
        "vectormill/jobs/waiting.py",
        "(now + KEPT_SECONDS, rows)",
        "(math.inf, rows)",
        (
            "tests/integration/jobs/test_waiting.py::test_a_large_answer_is_shared_for_a_second_and_a_small_one_is_not",
        ),
    ),
    Mutant(
        "rows are copied into a fill that is closed",
        "vectormill/collections/fills.py",
        "return row is not None and bool(row[0])",
        "return row is not None",
        (f"{FILLS}::test_a_commit_after_the_fill_was_closed_is_not_lost",),
    ),
    Mutant(
        "a second job copies keys that are in the fill",
        "vectormill/collections/fills.py",
        "CASE WHEN NOT EXISTS (SELECT 1 FROM {filled}) THEN %(job_id)s::text END",
        "%(job_id)s::text",
        (f"{FILLS}::test_a_job_in_the_place_of_one_that_has_copied_rows_upserts_its_own",),
    ),
    Mutant(
        "the fill wins over later rows",
        "vectormill/collections/fills.py",
        "            OR greatest(own.job_seq, described.job_seq) > greatest(filled.job_seq, kept.job_seq)\n",
        "",
        (f"{FILLS}::test_of_a_key_in_the_fill_and_beside_it_the_later_row_stays_with_its_own_metadata",),
    ),
    Mutant(
        "the fill loses to earlier rows",
        "vectormill/collections/fills.py",
        "greatest(own.job_seq, described.job_seq) > greatest(filled.job_seq, kept.job_seq)",
        "true",
        (f"{FILLS}::test_of_a_key_in_the_fill_and_beside_it_the_later_row_stays_with_its_own_metadata",),
    ),
    Mutant(
        "a later row without metadata gets those of the fill",
        "vectormill/collections/fills.py",
        "         WHERE kept.key = newer.key\n           AND NOT EXISTS",
        "         WHERE kept.key = newer.key AND false\n           AND NOT EXISTS",
        (f"{FILLS}::test_a_later_row_without_metadata_leaves_none_of_the_fill",),
    ),
    Mutant(
        "what was deleted during a fill comes back",
        "vectormill/collections/fills.py",
        "    remove_deleted(connection, generation)\n    _execute(",
        "    _execute(",
        (f"{FILLS}::test_what_is_deleted_during_a_fill_stays_deleted_and_what_is_put_again_is_there",),
    ),
    Mutant(
        "deleted texts stay in a fill that nobody finishes",
        "scheduler/scrubber.py",
        "                remove_deleted(connection, generation)\n",
        "                pass\n",
        (f"{FILLS}::test_a_deleted_text_goes_from_an_unfinished_fill_before_its_tombstone_does",),
    ),
    Mutant(
        "a run does not see what a broken build has copied",
        "indexer/reindexing.py",
        "        end_fill(context, generation.id)  #",
        "        pass  #",
        (f"{FILLS}::test_a_run_copies_into_an_empty_build_and_upserts_into_one_that_has_more_rows",),
    ),
    Mutant(
        "a run copies into a build however full it is",
        "indexer/reindexing.py",
        "return num_rows <= progress.counts.num_new + progress.counts.num_changed",
        "return num_rows >= 0",
        (f"{FILLS}::test_a_run_copies_into_an_empty_build_and_upserts_into_one_that_has_more_rows",),
    ),
    Mutant(
        "tables of a discarded fill stay",
        "vectormill/collections/swaps.py",
        ", *filled_names(generation_id)\n",
        "\n",
        (f"{FILLS}::test_a_discarded_or_removed_fill_leaves_no_table",),
    ),
    Mutant(
        "a span is dropped although a chunk of it was committed while the lock was waited for",
        "vectormill/jobs/partitions.py",
        """    connection.execute(LOCK_TABLES)
    if _is_needed""",
        """    if _is_needed""",
        (f"{PARTITIONS}::test_a_span_whose_chunks_are_committed_while_its_drop_waits_is_kept",),
    ),
    Mutant(
        "a span is dropped while some of its ids are still to come",
        "vectormill/jobs/partitions.py",
        "is_needed = span.end > last_id + 1 or",
        "is_needed =",
        (f"{PARTITIONS}::test_a_span_is_dropped_when_its_last_chunk_is_gone_and_not_before",),
    ),
    Mutant(
        "default partitions whose closing was interrupted refuse chunks for ever",
        "vectormill/jobs/partitions.py",
        """    SELECT EXISTS (SELECT FROM pg_constraint WHERE conname = 'closing'
                      AND connamespace = CAST('vectormill' AS regnamespace))""",
        "    SELECT false",
        (
            f"{PARTITIONS}::"
            "test_a_limit_of_the_default_partitions_that_a_killed_scheduler_has_left_refuses_no_chunk",
        ),
    ),
    Mutant(
        "each claim opens every partition",
        "vectormill/jobs/chunks.py",
        "LEFT JOIN LATERAL vectormill.payload_of(claimed.id) AS payload ON true",
        "LEFT JOIN vectormill.chunk_payloads AS payload ON payload.chunk_id = claimed.id",
        (
            f"{PARTITIONS}::"
            "test_a_claim_a_commit_and_a_page_of_an_export_open_only_the_partitions_of_their_chunk",
        ),
    ),
    Mutant(
        "texts of a deleted job stay as long as their partition",
        "scheduler/pruner.py",
        "for duty in (self._keep_partitions, self._delete_removed):",
        "for duty in (self._keep_partitions,):",
        (f"{PARTITIONS}::test_texts_of_a_large_job_beside_others_are_gone_when_they_are_due",),
    ),
    Mutant(
        "a drop waits as long for a dump as it takes, and everybody behind it",
        "vectormill/jobs/partitions.py",
        "limit_lock_wait(connection, LOCK_MILLISECONDS)",
        "limit_lock_wait(connection, 20_000)",
        (f"{PARTITIONS}::test_claims_and_commits_do_not_wait_for_a_drop_that_waits_for_a_dump",),
    ),
    Mutant(
        "unknown tokens are part of a vector of model2vec",
        "worker/tokens/static_tokenizer.py",
        "is_known = rows.values != self._unknown_id",
        "is_known = rows.values != -1",
        (
            f"{STATIC}::test_the_vectors_are_those_of_model2vec",
            f"{STATIC}::test_passages_and_token_ids_leave_out_unknown_tokens_too",
        ),
    ),
    Mutant(
        "a text of model2vec is read beyond the characters that its authors read",
        "worker/tokens/static_tokenizer.py",
        "[text[:num_chars] for text in texts]",
        "list(texts)",
        (f"{STATIC}::test_the_vectors_are_those_of_model2vec",),
    ),
    Mutant(
        "a text of unknown tokens has the vector 0",
        "worker/tasks/embed.py",
        "np.flatnonzero(texts.sequences.lengths == 0)",
        "np.flatnonzero(texts.sequences.lengths < 0)",
        (f"{STATIC}::test_an_engine_encodes_in_a_process_without_torch",),
    ),
    Mutant(
        "spans of a GLiNER overlap",
        "worker/tasks/extract/gliner.py",
        "if not is_taken[start : end + 1].any():",
        "if not is_taken[start : end + 1].all():",
        (f"{GLINER}::test_the_spans_are_those_of_the_package_alone_and_in_a_batch",),
    ),
    Mutant(
        "a span at the border of two windows is lost",
        "worker/tasks/extract/gliner.py",
        "end - min(self._author.overlap, (end - first) // 2)",
        "end",
        (f"{GLINER}::test_a_long_text_is_read_in_windows_that_share_more_words_than_a_span_has",),
    ),
    Mutant(
        "an LSTM reads the words of several texts as one",
        "worker/tasks/extract/model/gliner.py",
        'longest_first = np.argsort(-num_words, kind="stable")',
        "longest_first = np.arange(len(num_words))",
        (f"{GLINER}::test_the_logits_are_those_of_the_package",),
    ),
    Mutant(
        "batches are filled with tiles that are not full",
        "worker/batching/pool.py",
        "if waiting is self._bulk and (batch.num_sequences or fitting < num_waiting):",
        "if waiting is self._bulk and fitting < num_waiting:",
        (
            "tests/unit/batching/test_pool.py::test_bulk_that_fills_no_tile_waits_for_more_of_its_length_and_queries_do_not_wait",
        ),
    ),
    Mutant(
        "cells for which a queued extraction has no room are lost",
        "worker/tasks/extract/model/encoder.py",
        "if 2 * len(batch) + CELL_WIDTH * num_cells <= len(numbers):",
        "if num_cells:",
        (
            f"{WAITING}::test_a_queued_extraction_has_the_cells_of_one_that_is_waited_for_however_many_they_are",
        ),
    ),
    Mutant(
        "the head of an extraction has the bits of its encoder",
        "worker/tasks/extract/model/network.py",
        "    for part in (network.ffnq, network.ffnk, network.rotary_emb):",
        "    for part in (network.rotary_emb,):",
        (f"{EXTRACT_MODEL}::test_sixteen_bits_in_the_encoder_and_a_head_in_fp32_stay_near",),
    ),
    Mutant(
        "the prompt of a CrossEncoder is left out",
        "worker/tasks/score.py",
        "[spec.prompt + sides[index][0] for index in pairs]",
        "[sides[index][0] for index in pairs]",
        (f"{RERANKERS}::test_a_classifier_that_sentence_transformers_saved_agrees_with_it",),
    ),
    Mutant(
        "a ColBERT without its projection is accepted",
        "vectormill/models/heads.py",
        "if files.weights and not shapes:",
        "if False:",
        ("tests/unit/deployment/test_heads.py::test_a_colbert_of_stanford_is_read_with_its_settings",),
    ),
    Mutant(
        "a model process logs at its own level",
        "worker/runner/runner.py",
        "logging.getLevelName(logger.getEffectiveLevel())",
        '"INFO"',
        ("tests/unit/runner/test_runner.py::test_a_model_process_logs_what_its_parent_would_log",),
    ),
    Mutant(
        "a decoder with code of its own is read from left to right",
        "vectormill/models/embedders.py",
        'if code and "is_causal" not in files.config and',
        "if False and",
        (
            "tests/contract/test_published_decoders.py::"
            "test_a_decoder_with_code_of_its_own_must_say_whether_it_reads_from_left_to_right",
        ),
    ),
    Mutant(
        "the health check of an address loads what only the others need",
        "deploy/healthcheck.py",
        'if "://" not in subject:',
        "if find_missing_heartbeat(subject):",
        ("tests/unit/deployment/test_compose.py::test_an_address_is_checked_by_the_standard_library_alone",),
    ),
    Mutant(
        "a release is built from a tree with changes",
        "deploy/release.py",
        'if read_git("status", "--porcelain"):',
        "if False:",
        (
            "tests/integration/distribution/test_release.py::"
            "test_only_a_clean_tree_at_its_tag_with_one_version_and_a_section_is_released",
        ),
    ),
    Mutant(
        "a run reads from the mark of the last run, and so misses late commits",
        "vectormill/runs/increments.py",
        '"since": before["newest"]',
        '"since": last["newest"]',
        (
            "tests/integration/runs/test_increments.py::"
            "test_a_transaction_that_was_open_during_a_run_is_found_by_the_next[bigint]",
        ),
    ),
    Mutant(
        "an incremental run deletes what it did not read",
        "vectormill/sources/sql.py",
        "self.tells_what_vanished = False",
        "self.tells_what_vanished = True",
        (
            "tests/integration/runs/test_increments.py::"
            "test_what_changed_is_read_and_what_vanished_is_found_by_a_full_run[bigint]",
        ),
    ),
    Mutant(
        "a job is refused although one of the live workers has loaded its model",
        "vectormill/jobs/waiting.py",
        "if not fitting or any(worker.slots or",
        "if not fitting or all(worker.slots or",
        (
            "tests/integration/cli/test_commands.py::"
            "test_a_job_that_every_live_worker_has_failed_to_load_is_refused_unless_it_may_wait",
        ),
    ),
    Mutant(
        "an import overwrites what jobs write later",
        "vectormill/collections/imports.py",
        "IMPORTED_PLACE: Final = 0",
        "IMPORTED_PLACE: Final = 1 << 40",
        ("tests/integration/cli/test_imports.py::test_rows_of_jobs_and_deletions_are_newer_than_an_import",),
    ),
    Mutant(
        "deletions of a collection's first day are forgotten, and an import brings their keys back",
        "vectormill/collections/deletions.py",
        "25 * make_interval",
        "0 * make_interval",
        (
            "tests/integration/cli/test_imports.py::"
            "test_a_deletion_that_is_forgotten_after_a_day_is_not_undone_without_a_word",
        ),
    ),
    Mutant(
        "an import brings back what was deleted from an old collection without a word",
        "vectormill/collections/imports.py",
        "not again and not remembers.scalar_one()",
        "remembers.scalar_one() is None",
        (
            "tests/integration/cli/test_imports.py::"
            "test_a_deletion_that_is_forgotten_after_a_day_is_not_undone_without_a_word",
        ),
    ),
    Mutant(
        "vectors are imported into a collection of the same name in another database than the API's",
        "vectormill/cli/imports.py",
        "is_same = (found.id, found.created_at) ==",
        "is_same = found.id > 0 or () ==",
        (
            "tests/integration/cli/test_imports.py::"
            "test_nothing_is_written_into_another_database_than_that_of_the_api",
        ),
    ),
    Mutant(
        "a row with an empty text takes over the vector of a row that was imported without its text",
        "vectormill/sources/vectors.py",
        'else own if text else b""',
        "else own",
        (
            "tests/integration/cli/test_imports.py::"
            "test_a_later_run_encodes_what_differs_from_the_texts_and_all_rows_that_came_without",
        ),
    ),
    Mutant(
        "vectors of other texts or another model are imported",
        "vectormill/cli/imports.py",
        "LEAST_COSINE: Final = 0.99",
        "LEAST_COSINE: Final = -1.0",
        (
            "tests/integration/cli/test_imports.py::"
            "test_vectors_that_the_model_does_not_give_are_refused_and_leave_no_collection",
        ),
    ),
    Mutant(
        "an import that fails deletes what others have written into its collection",
        "vectormill/collections/removals.py",
        "counts != (num_imported, num_imported, 0)",
        "counts[1] != num_imported",
        (
            "tests/integration/cli/test_imports.py::"
            "test_vectors_that_differ_at_the_end_are_removed_unless_others_have_written_into_the_collection",
        ),
    ),
    Mutant(
        "the binary form of a value enters as metadata",
        "vectormill/sources/vectors.py",
        "else [read_text(value, name) for value in column]",
        "else column",
        (
            "tests/integration/cli/test_imports.py::"
            "test_values_of_a_type_of_the_database_enter_as_texts_and_others_are_refused",
        ),
    ),
    Mutant(
        "of two models that are added at once one is lost",
        "vectormill/models/registry.py",
        "fcntl.flock(lock, fcntl.LOCK_EX)",
        "pass",
        (
            "tests/unit/deployment/test_registry.py::"
            "test_commands_that_add_models_at_once_wait_for_one_another",
        ),
    ),
    Mutant(
        "of two models that are added at once under one name the later replaces the former",
        "vectormill/cli/models.py",
        "change_added(file, enter)",
        "change_added(file, lambda entries: {**entries, name: entry})",
        (
            "tests/integration/cli/test_models_command.py::"
            "test_of_two_commands_that_add_one_name_at_once_the_later_is_refused",
        ),
    ),
    Mutant(
        "a change of the added models drops those of a later release",
        "vectormill/models/registry.py",
        "write_added(path, changed, later)",
        "write_added(path, changed)",
        (
            "tests/unit/deployment/test_registry.py::"
            "test_an_added_model_of_a_later_release_is_left_out_with_a_warning_and_stays_in_the_file",
        ),
    ),
    Mutant(
        "the event loop reads the files of a model that was replaced",
        "vectormill/models/registry.py",
        "self._find_card(name, entry, weights=False) is not None",
        "(name, False) in self._cards",
        (
            "tests/unit/deployment/test_registry.py::"
            "test_a_card_that_was_read_of_another_entry_is_not_told_as_read",
        ),
    ),
    Mutant(
        "a backup fails when a collection is deleted meanwhile",
        "vectormill/db/backup.py",
        "DUMP_ATTEMPTS: Final = 3",
        "DUMP_ATTEMPTS: Final = 1",
        ("tests/integration/cli/test_backups.py::test_a_dump_that_met_a_dropped_table_is_repeated",),
    ),
    Mutant(
        "a rate jumps with each chunk that is committed",
        "api/console/history.py",
        "SMOOTHED_SECONDS: Final = 10.0",
        "SMOOTHED_SECONDS: Final = 0.1",
        (
            "tests/unit/api/console/test_history.py::"
            "test_a_rate_is_a_mean_of_ten_seconds_and_not_of_the_chunk_that_was_just_committed",
        ),
    ),
)
