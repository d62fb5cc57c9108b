"""The tables of jobs' inputs and outputs in object storage, and of the parts of outputs."""

from sqlalchemy import BigInteger, Column, ForeignKey, LargeBinary, Table, Text, Uuid
from sqlalchemy.dialects.postgresql import JSONB

from vectormill.db.schema import BUSY, choice, count, index, lease, metadata, moment, one_of
from vectormill.jobs.table import jobs
from vectormill.objects.input import INPUT, INPUT_STATES
from vectormill.objects.output import DUE_OUTPUT_STATES, OUTPUT_STATES

job_inputs = Table(
    "job_inputs",
    metadata,
    Column("id", Uuid, ForeignKey(jobs.c.id, ondelete="CASCADE"), primary_key=True),  # of the job
    Column("request", JSONB, nullable=False),  # an InputBody
    Column("collection", Text),  # that the job is to write, by name
    choice("state", INPUT_STATES),
    *lease(BigInteger),
    Column("error", Text),
    count("num_items"),
    count("num_compared"),
    index("ix_job_inputs_due", "available_at", where=one_of("state", INPUT.open)),
    postgresql_with=BUSY | {"autovacuum_vacuum_threshold": "500"},
)

job_outputs = Table(
    "job_outputs",
    metadata,
    Column("id", Uuid, ForeignKey(jobs.c.id, ondelete="CASCADE"), primary_key=True),  # of the job
    Column("url", Text, nullable=False, unique=True),
    Column("table_url", Text),  # of a catalog, to which the parts are added at the end
    Column("table_schema", LargeBinary),  # the Arrow schema of parts that fit the table
    choice("state", OUTPUT_STATES),
    *lease(BigInteger),
    Column("last_error", Text),
    moment("closed_at"),
    count("num_swept"),
    index("ix_job_outputs_due", "available_at", where=one_of("state", DUE_OUTPUT_STATES)),
    postgresql_with=BUSY | {"autovacuum_vacuum_threshold": "500"},
)

output_parts = Table(
    "output_parts",
    metadata,
    Column("job_id", Uuid, ForeignKey(job_outputs.c.id, ondelete="CASCADE"), primary_key=True),
    Column("name", Text, primary_key=True),  # in the order of items
    Column("first_item", BigInteger, nullable=False),
    Column("num_rows", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
)
