"""All states of a table, of which the product names only the groups that it asks for."""

from typing import Final

from vectormill.batches.request_batch import DELETING, PROCESSED, UPLOADING
from vectormill.domain.states import States
from vectormill.jobs import job
from vectormill.jobs.chunk import CANCELLED, DONE, FAILED, OPEN_CHUNK_STATES, SPLIT

ALL_JOB_STATES: Final = States((*job.JOB_STATES, job.DELETING))
CHUNK_STATES: Final = States((*OPEN_CHUNK_STATES, DONE, FAILED, CANCELLED, SPLIT))
REQUEST_FILE_STATES: Final = States((UPLOADING, PROCESSED, DELETING))
