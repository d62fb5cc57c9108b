"""The page that submits a file of texts, which is read as the command line reads it, and submitted as a stream is."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import BinaryIO, Final, cast

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool
from fastapi.responses import HTMLResponse

from api.console.console import ConsoleDependency
from api.dependencies import Resources, ResourcesDependency
from api.intake.file_uploads import receive_form
from api.intake.submissions import submit_lines
from vectormill.collections.descriptions import list_collection_rows
from vectormill.domain.encoding import DEFAULT_MODEL
from vectormill.domain.errors import DiskFull, InvalidItem, InvalidSubmission
from vectormill.domain.task import JUDGE
from vectormill.files.formats import PACKED, describe_inputs
from vectormill.files.ndjson import encode_parts
from vectormill.jobs.job import FILE
from vectormill.jobs.operations import JobBody, SubmissionQuery
from vectormill.rows.columns import Columns
from vectormill.rows.inputs import FORMAT_OF_SUFFIX, RowReading, TextTree, find_format, read_texts

router = APIRouter(include_in_schema=False)

SUBMIT: Final = "/console/submit"
MOST_COLLECTIONS: Final = 1000
# A file of one text; its key is the name of the file.
ONE_TEXT: Final = (".txt", ".md")
FORMATS: Final = f"{describe_inputs()}, or {' or '.join(ONE_TEXT)} for one text"
ADVICE: Final = "Name others as column of the texts, of the keys or of the second texts."
# The longest name of a temporary file, in characters of up to four bytes.
MOST_NAME_CHARS: Final = 60
# The name of the file until its form has been read.
UPLOAD: Final = "upload"


@router.get(SUBMIT)
def get_form(request: Request, resources: ResourcesDependency, console: ConsoleDependency) -> HTMLResponse:
    """Return the form, with the names of models and of collections."""
    with resources.engine.connect() as connection:
        collections = [
            row.name for row in list_collection_rows(connection, after=None, limit=MOST_COLLECTIONS)
        ]
    return console.page(
        request,
        "submit.html",
        models=resources.registry.names(),
        default=DEFAULT_MODEL,
        collections=collections,
        formats=FORMATS,
        suffixes=",".join((*FORMAT_OF_SUFFIX, *ONE_TEXT, *PACKED)),
    )


@router.post(SUBMIT)
async def post_form(request: Request, resources: ResourcesDependency) -> Response:
    """Make a job of the form's file, and lead the browser to its page. Raise the errors of a submission."""
    with resources.gates.uploads.enter():
        async with contextmanager_in_threadpool(open_upload()) as file:
            name, fields = await receive_form(request, resources.settings, file.write)
            job = await run_in_threadpool(submit_upload, file, name, fields, resources)
    return Response(status_code=204, headers={"HX-Redirect": f"/console/jobs/{job['id']}"})


@contextmanager
def open_upload() -> Iterator[BinaryIO]:
    """Yield a new file, alone in a temporary folder that is removed at the end of the block. Raise DiskFull."""
    try:
        with TemporaryDirectory() as folder, Path(folder, UPLOAD).open("wb") as file:
            yield file
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(f"No room is left in {gettempdir()} for the file.") from error


def submit_upload(file: BinaryIO, name: str, fields: Mapping[str, str], resources: Resources) -> JobBody:
    """Make a job of the upload of this name and of the form's fields. Raise the errors of a submission."""
    file.close()
    path = Path(file.name)
    path = path.rename(path.with_name(name[-MOST_NAME_CHARS:] if name.strip(".") else UPLOAD))
    given = {field: value for field, value in fields.items() if value}
    is_text = path.suffix.lower() in ONE_TEXT
    if not is_text and find_format(path.name) is None:
        raise InvalidItem(f"{path.name} has no format that is read here; it must end in {FORMATS}.")
    settings = resources.settings
    query = SubmissionQuery(
        model=given.get("model", DEFAULT_MODEL),
        collection=given.get("collection"),
        task=JUDGE if "pair" in given else None,
        metadata=msgspec.json.encode({FILE: path.name}).decode(),
    )
    columns = Columns(given.get("text", "text"), given.get("key"), given.get("pair"))
    reading = RowReading(columns, False, ADVICE, settings.max_line_bytes, settings.max_gzip_ratio)
    with path.open("rb") as opened:
        texts = (
            [TextTree(path.parent).read(path, opened, settings.max_line_bytes + 1)]
            if is_text
            else read_texts(str(path), reading)
        )
    try:
        return cast(JobBody, submit_lines(encode_parts(texts), query, resources))
    except InvalidSubmission as error:  # it names the file with its temporary folder
        raise type(error)(str(error).replace(f"{path.parent}/", "")) from error
