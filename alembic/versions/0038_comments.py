"""Comment on each table, and on the columns and indexes whose names do not say why they exist.

Revision ID: 0038
Revises: 0037

`\\d+` in psql shows the comments, and so does docs/SCHEMA.md, which is written from a migrated database.
"""

from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None

COMMENTS = {
    "TABLE api_keys": "Keys of the API, of which only hashes are kept.",
    "COLUMN api_keys.hash": "SHA-256 of the secret.",
    "COLUMN api_keys.last_used_at": "Accurate to the hour, so that not every request writes a row.",
    "INDEX uq_api_keys_name": "A name is free again when its key is revoked, so that a secret can be replaced under the same name.",
    "TABLE calibrations": "The ranges of int8 codes, one row for each vector space.",
    "COLUMN calibrations.fingerprint": "Of the EncodingSpec that names the vector space.",
    "COLUMN calibrations.ranges": "float32, little-endian, [2, dimensions]: the smallest and the largest value of each dimension.",
    "TABLE chunk_payloads": "The items of chunks. They lie in partitions by chunk id, as results do, which are dropped when no "
    "chunk of theirs is left (vectormill/jobs/partitions.py). So there is no foreign key: rows of a deleted chunk go with "
    "their partition, or are deleted singly after a few minutes.",
    "COLUMN chunk_payloads.places": "The position of each item in the order of writers, for rows copied from another generation; "
    "NULL if that of the job applies.",
    "TABLE chunk_truncations": "Which items of chunks were cut.",
    "COLUMN chunk_truncations.items": "Positions in the chunk.",
    "TABLE chunk_vectors": "The results of chunks whose job writes no collection.",
    "COLUMN chunk_vectors.vectors": "Rows [num_items, width] of the vector type of the job (pack_block in vectormill/vectors/vector_types.py).",
    "COLUMN chunk_vectors.item_tokens": "The token count of each item, int32 [num_items]; NULL for records.",
    "TABLE chunks": "Parts of jobs, which workers claim. The fillfactor leaves room in each page, so that most updates by claims "
    "stay on the same page.",
    "COLUMN chunks.first_item": "The position in the job of the first item.",
    "COLUMN chunks.only_items": "Set by a retry: only these positions within the chunk are encoded.",
    "COLUMN chunks.is_alone": "Its worker encoded no other chunk meanwhile (release_orphaned_chunks in vectormill/jobs/rescue.py).",
    "COLUMN chunks.estimated_tokens": "By TokenEstimate in vectormill/jobs/chunk.py.",
    "COLUMN chunks.proof_id": "The period between two proofs of a worker in which the results were computed; NULL if unknown.",
    "COLUMN chunks.is_suspect": "The results were computed by a faulty model process and cannot be encoded again "
    "(vectormill/jobs/recomputation.py); NULL means no.",
    "INDEX ix_chunks_job_id_seq": "Not unique, because that would keep chunks from being partitioned by id (decision 0056). "
    "A transaction that numbers chunks has created the job itself, or holds the lock of its row.",
    "INDEX ix_chunks_held": "Not on lease_until, because each renewal would then update every index of the table. Few chunks are "
    "leased at a time.",
    "INDEX ix_chunks_suspect": "Nearly always empty, so that a commit pays nothing for it.",
    "TABLE codebooks": "Codebooks of residual codes. One is written once for a vector space and never changed: rows have codes "
    "that mean nothing without it.",
    "COLUMN codebooks.fingerprint": "Of the EncodingSpec that gives multi-vectors alone.",
    "COLUMN codebooks.digest": "A hash of the content, with which the codes of each row begin.",
    "TABLE collections": "Collections. Each has a view of its name in the schema public.",
    "COLUMN collections.keep_text": "Whether texts are kept beside the results.",
    "COLUMN collections.language": "The text search configuration of kept texts.",
    "COLUMN collections.filters": "The metadata fields that are indexed in each generation.",
    "TABLE generations": "Generations of collections. The rows of one lie in generation_<id> and their attributes in "
    "generation_<id>_attributes, which are created at run time (vectormill/collections/generation_tables.py).",
    "COLUMN generations.report": "Reports of the canary and of the index: what was chosen and why.",
    "COLUMN generations.held_until": "No chunk of its jobs is dispatched before: a swap waits for twins in the next generation.",
    "INDEX uq_generations_live": "A collection has at most one live generation, which its view reads.",
    "INDEX uq_generations_building": "At most one generation of a collection is being built.",
    "TABLE heartbeats": "When each duty was last done (vectormill/workers/workers.py).",
    "TABLE idempotency_keys": "The Idempotency-Keys of files, pushes, runs and webhooks. Jobs and batches have theirs in their own rows.",
    "COLUMN idempotency_keys.made_id": "What the request has made; NULL only within the transaction that inserts the row.",
    "TABLE item_errors": "Why items have no result.",
    "COLUMN item_errors.item": "The position in the job.",
    "TABLE job_increments": "What ended chunks add to the counters of their jobs. A row is deleted when the row of the job includes "
    "it (vectormill/jobs/counters.py). There is no foreign key, whose check would lock the row that commits must not wait for.",
    "TABLE job_inputs": "Jobs whose items an indexer reads from object storage.",
    "COLUMN job_inputs.id": "Of the job.",
    "COLUMN job_inputs.request": "An InputBody.",
    "COLUMN job_inputs.collection": "The name of the collection that the job is to write.",
    "TABLE job_outputs": "Jobs whose results go to object storage.",
    "COLUMN job_outputs.id": "Of the job.",
    "COLUMN job_outputs.table_url": "Of the table of a catalog to which the parts are added at the end.",
    "COLUMN job_outputs.table_schema": "The Arrow schema of parts that fit the table.",
    "TABLE jobs": "Jobs: the items of one submission, which one model encodes by one spec.",
    "COLUMN jobs.seq": "The order of submissions, and of writers: a row of a collection is never overwritten by a job with a lower seq.",
    "COLUMN jobs.place": "The position in the order of writers that a twin inherits from its original; NULL if its own seq applies.",
    "COLUMN jobs.twin_of": "The job whose items this one encodes for a generation that is being built beside the live one.",
    "COLUMN jobs.traceparent": "The W3C trace context of the request that submitted the job; NULL if no traces are recorded.",
    "COLUMN jobs.num_open_chunks": "The transaction that brings this to zero ends the job.",
    "COLUMN jobs.idle_seconds": "The seconds since started_at in which the job was paused, or had ended before a retry.",
    "COLUMN jobs.forget_at": "When the job is no longer needed, whether or not the API has removed it.",
    "INDEX ix_jobs_dispatched": "The dispatcher reads its beginning many times a second, so jobs that it must not dispatch are not in it.",
    "INDEX ix_jobs_open": "The open jobs of a generation, in the order of writers.",
    "INDEX ix_jobs_changes_of": "A hash, because clients choose the metadata, and a tree refuses long values.",
    "TYPE multi_vector": "In which a commit sends the multi-vectors of many rows, since an array of arrays cannot be sent.",
    "TABLE open_job_counts": "Counts of open jobs. A trigger on jobs adds rows for what a transaction has changed, negative ones for "
    "what is no longer so, and the scheduler adds rows up (vectormill/jobs/backlog.py). Nobody waits for a row, and nobody reads jobs.",
    "COLUMN open_job_counts.num_items": "Items without a result, rounded up to 64ths of each job.",
    "COLUMN open_job_counts.num_chunks": "Chunks that have not ended, rounded up to 64ths of each job.",
    "TABLE output_parts": "The Parquet files of outputs.",
    "COLUMN output_parts.name": "In the order of items.",
    "TABLE proofs": "The periods of workers between two proofs, each with what the worker ran (decision 0078). One without proven_at "
    "and failed_at is the current one, or its worker was killed.",
    "TABLE removed_chunks": "Ids of deleted chunks, whose texts and results are still to be deleted. A trigger on chunks adds them.",
    "COLUMN removed_chunks.chunk_ids": "At most 100.",
    "TABLE request_batches": "Batches of requests. No foreign keys, since files and jobs are deleted independently of the batch.",
    "COLUMN request_batches.content_hash": "Of the request, to recognize a repetition.",
    "COLUMN request_batches.is_overdue": "The completion window passed before the job had ended, and the job was cancelled for that reason.",
    "COLUMN request_batches.finished_at": "In whichever final state.",
    "INDEX ix_request_batches_open": "Indexers poll the open batches all the time, while nearly all batches have ended.",
    "TABLE request_file_parts": "The content of files of requests.",
    "COLUMN request_file_parts.content": "Compressed with zstd.",
    "TABLE request_files": "Files of requests.",
    "COLUMN request_files.seq": "The order in which files are listed.",
    "COLUMN request_files.batch_id": "Set if the content is made from the results of the job of this batch; NULL if it is stored in "
    "request_file_parts.",
    "INDEX ix_request_files_expires_at": "For the pruner, which looks for expired files.",
    "INDEX ix_request_files_unlisted": "For the pruner, which looks for incomplete and deleted files.",
    "TABLE request_refusals": "Refused lines of files of requests, until the error file contains them.",
    "TABLE run_parts": "Rows that a client pushed, in parts and in order (vectormill/sources/pushes.py).",
    "TABLE runs": "Runs, which keep a collection in step with its source, or index or check it.",
    "COLUMN runs.seq": "A number of the sequence of jobs.seq, drawn when the run begins to read; writes with a larger one are newer.",
    "COLUMN runs.generation_id": "The generation that the run writes.",
    "COLUMN runs.job_id": "The job that encodes.",
    "COLUMN runs.spec": "The requested one; NULL means that of the live generation.",
    "INDEX uq_runs_schedule_id_due_at": "At most one run for each due time, however many schedulers look and however often.",
    "INDEX uq_runs_running": "At most one active run of a collection.",
    "INDEX ix_runs_builds": "The index maintainer asks each collection for its last builds.",
    "TABLE schedules": "When runs of collections are due.",
    "COLUMN schedules.options": "Those of the runs.",
    "TABLE source_changes": "Changed keys of followed tables, written by triggers on a table of the user in the transaction that "
    "changed the row. There is no foreign key, which would make each of these transactions lock the row of the collection.",
    "TABLE sources": "The source of each collection.",
    "COLUMN sources.options": "Never a secret: database credentials are named here and read on the machine that reads the source.",
    "TABLE tombstones": "Deleted keys of collections.",
    "COLUMN tombstones.seq": "A number of the sequence of jobs.seq: a job with a smaller number does not write the key again.",
    "COLUMN tombstones.scrubbed_at": "From when no payload of a job held the text of the item any more.",
    "TABLE webhook_deliveries": "Messages to webhooks, inserted by triggers on jobs and runs. There is no foreign key: a commit that "
    "ends a job must neither fail nor wait because a webhook is being deleted.",
    "COLUMN webhook_deliveries.event_id": "The same at every attempt, so that a receiver recognizes duplicates.",
    "COLUMN webhook_deliveries.payload": "What is signed and sent.",
    "COLUMN webhook_deliveries.due_at": "When the next attempt is due, or when the attempt in progress was due.",
    "TABLE webhooks": "URLs to which the ends of jobs and runs are reported.",
    "COLUMN webhooks.secret": "Not hashed, since both sides compute signatures with it.",
    "COLUMN webhooks.failing_since": "The first failure since the last success.",
    "COLUMN webhooks.num_refused": "Attempts that failed.",
    "COLUMN webhooks.num_failed": "Deliveries that failed for good.",
    "TABLE workers": "Workers that send heartbeats.",
    "COLUMN workers.launcher": "The launching run of `vectormill worker`: only its next worker may take over the name at once.",
    "COLUMN workers.max_tokens_in_flight": "The limit that the worker asks for; NULL while its model loads.",
}


def upgrade() -> None:
    """Write the comments. Nobody who reads or writes rows waits for that."""
    for place, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {place.replace(' ', ' vectormill.')} IS '{comment}'")


def downgrade() -> None:
    """Remove the comments."""
    for place in COMMENTS:
        op.execute(f"COMMENT ON {place.replace(' ', ' vectormill.')} IS NULL")
