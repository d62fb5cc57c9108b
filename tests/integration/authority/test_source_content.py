"""Who controls the content of a file, but no key: a file of some kB that unfolds to gigabytes fills no memory.

Each door is tried by a process of its own, which tells the most memory that it had.
"""

import gzip
import io
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client
from tests.protocol import SPEC
from tests.services import connected_engine
from vectormill.domain.errors import InvalidItem, VectormillError
from vectormill.files.roots import ANYWHERE
from vectormill.jobs.chunk import TokenEstimate
from vectormill.models.registry import Registry
from vectormill.objects.reading import ChunkLimits, choose_format, cut_object
from vectormill.objects.store import describe_object
from vectormill.rows.columns import Columns
from vectormill.rows.decoding import MOST_NAMES, read_json_rows, read_parquet_rows
from vectormill.settings import Settings
from vectormill.sources.opening import open_source
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import FILES, Source
from vectormill.sources.vectors import ImportColumns, open_files

MOST_BYTES = 640 << 20
# Where rows are read by reference: those of a row group that are kept (256 MiB), and four times those of a chunk.
MOST_BYTES_OF_REFERENCES = 1 << 30
NUM_ROWS = 768
LONG = 1 << 20


def list_keys() -> pa.Array:
    return pa.array([f"k{number}" for number in range(NUM_ROWS)])


def write_table(path: Path, columns: Mapping[str, Any], **options: Any) -> None:
    pq.write_table(pa.table(dict(columns)), path, compression="zstd", **options)


def share(value: str, number: int) -> pa.Array:
    """Return a column of so many equal texts, without writing them out."""
    return pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), number), pa.array([value]))


def write_shared(path: Path) -> None:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array([0.5] * 2 * NUM_ROWS, pa.float32()), 2)
    columns = {"key": list_keys(), "text": share("x" * LONG, NUM_ROWS), "embedding": vectors}
    write_table(path, columns, store_schema=False)


def write_shared_as_category(path: Path) -> None:
    write_table(path, {"key": list_keys(), "text": share("x" * LONG, NUM_ROWS)})


def write_prefixes(path: Path) -> None:
    texts = ["x" * LONG + str(number) for number in range(48)]
    columns = {"key": list_keys()[:48], "text": texts}
    write_table(path, columns, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})


def write_large_page(path: Path) -> None:
    write_table(path, {"key": ["a"], "text": ["x" * (260 << 20)]}, use_dictionary=False, store_schema=False)


def write_list(path: Path) -> None:
    tags = pa.ListArray.from_arrays([0, 100_000], share("x" * LONG, 100_000))
    write_table(path, {"key": ["a"], "text": ["x"], "tags": tags}, store_schema=False)


def write_list_of_nothing(path: Path) -> None:
    numbers = pa.nulls(50_000_000, pa.int64())
    write_table(
        path, {"key": ["a"], "text": ["x"], "tags": pa.ListArray.from_arrays([0, len(numbers)], numbers)}
    )


def write_belied(path: Path) -> None:
    """Write a column chunk whose footer says that it is small."""
    write_large_page(path)
    size = pq.ParquetFile(path).metadata.row_group(0).column(1).total_uncompressed_size
    content = path.read_bytes()
    (true, false) = (write_varint(2 * each) for each in (size, 100 + (1 << 29)))
    assert len(true) == len(false)
    assert content.count(true) >= 1
    path.write_bytes(content[: len(content) // 2] + content[len(content) // 2 :].replace(true, false))


def write_varint(number: int) -> bytes:
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    return bytes([*written, number])


def write_packed(path: Path, start: bytes, repeated: bytes, number: int) -> None:
    """Write a file of gzip with so many members that are alike."""
    member = gzip.compress(repeated * ((8 << 20) // len(repeated)), 1)
    path.write_bytes(gzip.compress(start) + member * number)


def write_line(path: Path) -> None:
    write_packed(path, b'{"key": "a", "text": "', b"x" * 1024, 128)


def write_cell(path: Path) -> None:
    write_packed(path, b'key,text\na,"', b"xyz\n" * 256, 128)


def write_rows(path: Path) -> None:
    write_packed(path, b"key,text\n", b'a,"' + b"x" * 4092 + b'"\n', 128)


def write_open_cell(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'key,text\na,"')
        file.truncate(2 << 30)


# Each file by its name: how it is written, and how any door refuses it, unless it has rows that can be read.
FILES_OF: dict[str, tuple[Callable[[Path], None], str]] = {
    "shared.parquet": (write_shared, ""),
    "category.parquet": (write_shared_as_category, ""),
    "prefixes.parquet": (write_prefixes, ""),
    "page.parquet": (write_large_page, "row group 0 has pages of"),
    "belied.parquet": (write_belied, "row group 0 has pages of"),
    "list.parquet": (write_list, "row group 0 has lists in 'tags"),
    "nothing.parquet": (write_list_of_nothing, "row group 0 has lists in 'tags"),
    "line.jsonl.gz": (write_line, "the line has more than|expands to more than 200 times"),
    "cell.csv.gz": (write_cell, "more than 16,777,216 bytes|expands to more than 200 times"),
    "rows.csv.gz": (write_rows, "expands to more than 200 times"),
    "open.csv": (write_open_cell, "line 2: more than 16,777,216 bytes"),
}


# -- The doors, which run in a process of their own -------------------------------------------------------------------


def make_place() -> SourcePlace:
    return SourcePlace(cast("Engine", None), Settings(), Registry({}), collection="docs", spec=SPEC)


def read_source(path: Path, url: str) -> str:
    tags = ["tags"] if path.name.startswith(("list", "nothing")) else []
    source = Source(FILES, {"files": [str(path)], "metadata": tags})
    return f"{sum(len(batch) for batch in open_source(source, make_place()).read())} rows"


def read_references(path: Path, url: str) -> str:
    found = describe_object(f"file://{path}", ANYWHERE)
    tags = ("tags",) if path.name.startswith(("list", "nothing")) else ()
    columns = Columns("text", "key", metadata=tags)
    settings = Settings()
    limits = ChunkLimits(settings.chunk_max_items, settings.chunk_max_bytes, settings.max_line_bytes)
    cuts = cut_object(found, choose_format(found, None), columns, TokenEstimate(SPEC), limits)
    return f"{sum(len(cut.reference.read()) for cut in cuts)} rows"


def import_vectors(path: Path, url: str) -> str:
    source = open_files(str(path), ImportColumns(text="text"), make_place())
    return f"{sum(len(rows.items) for rows in source.batches)} rows"


def ask(path: Path, url: str, send: Callable[[httpx.Client], httpx.Response]) -> str:
    with connected_engine(url) as engine, api_client(engine, source_root=path.parent) as client:
        client.timeout = httpx.Timeout(120)
        return send(client).text


def send_form(path: Path, url: str) -> str:
    def send(client: httpx.Client) -> httpx.Response:
        token = client.get("/console/submit").text.partition('"X-CSRF-Token": "')[2].partition('"')[0]
        headers = {"X-CSRF-Token": token, "HX-Request": "true"}
        return client.post("/console/submit", headers=headers, files={"file": (path.name, path.read_bytes())})

    return ask(path, url, send)


def send_body(path: Path, url: str) -> str:
    headers = {"Content-Type": "application/x-ndjson", "Content-Encoding": "gzip"}
    return ask(path, url, lambda client: client.post("/v1/jobs", content=path.read_bytes(), headers=headers))


def ask_for_quote(path: Path, url: str) -> str:
    body = {"input": {"urls": [f"file://{path}"], "key": "key"}, "dry_run": True}
    return ask(path, url, lambda client: client.post("/v1/jobs", json=body))


def write_files(path: Path, url: str) -> str:
    for name, (write, _) in FILES_OF.items():
        write(path / name)
    return ""


DOORS = {
    each.__name__: each
    for each in (
        write_files,
        read_source,
        read_references,
        import_vectors,
        send_form,
        send_body,
        ask_for_quote,
    )
}
TRIED = [
    *(("read_source", name) for name in FILES_OF if name != "rows.csv.gz"),
    *(("read_references", name) for name in ("shared.parquet", "belied.parquet", "list.parquet", "open.csv")),
    ("import_vectors", "shared.parquet"),
    *(("send_form", name) for name in ("shared.parquet", "belied.parquet", "line.jsonl.gz", "rows.csv.gz")),
    ("send_body", "line.jsonl.gz"),
    *(("ask_for_quote", name) for name in ("shared.parquet", "page.parquet", "open.csv")),
]


def run_apart(door: str, path: Path, url: str = "") -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.integration.authority.test_source_content", door, str(path), url]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bombs")
    run_apart("write_files", folder)
    return folder


@pytest.mark.parametrize(("door", "name"), TRIED)
def test_no_file_takes_more_memory_than_its_bounds(door: str, name: str, files: Path, engine: Engine) -> None:
    told = run_apart(door, files / name, engine.url.render_as_string(hide_password=False))
    is_reference = door in ("read_references", "ask_for_quote")
    assert told["most_bytes"] <= (MOST_BYTES_OF_REFERENCES if is_reference else MOST_BYTES), told
    refusal = FILES_OF[name][1]
    assert re.search(refusal or r"^\d+ rows$|\"num_sampled\":|^$", told["said"]), told


def test_a_damaged_file_of_parquet_is_refused_and_ends_no_process() -> None:
    rows = {"key": list_keys(), "text": ["x"] * NUM_ROWS, "tags": [["a"], []] * (NUM_ROWS // 2)}
    written = io.BytesIO()
    pq.write_table(pa.table(rows), written, write_page_index=True, data_page_size=256)
    columns, chance, refused = Columns("text", "key", metadata=("tags",)), random.Random(4), 0
    for _ in range(400):
        content = bytearray(written.getvalue())
        for place in (chance.randrange(len(content)), -8 - chance.randrange(2000)):
            content[place] = chance.randrange(256)
        try:
            list(read_parquet_rows(io.BytesIO(content), columns, "damaged.parquet"))
        except InvalidItem:
            refused += 1
    assert refused > 40


@pytest.mark.parametrize("kind", [1, 2, 3, 7, 8, 9, 12])
def test_a_list_of_a_footer_ends_with_the_footer(kind: int) -> None:
    footer = bytes([0x19, 0xF0 | kind]) + b"\xff" * 8 + b"\x01"  # a field with a list of 2^57 - 1 values
    content = b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    with pytest.raises(InvalidItem, match="no valid header"):
        list(read_parquet_rows(io.BytesIO(content), Columns("text"), "endless.parquet"))


def test_names_of_fields_that_never_repeat_are_forgotten() -> None:
    seen: list[int] = []

    def choose(present: Sequence[str], place: str) -> Columns:
        seen.append(len(present))
        return Columns("text", "key").find(present, place)

    blocks = (
        "".join(
            f'{{"key": "{row}", "text": "x", "field {row}": 1}}\n' for row in range(first, first + 1000)
        ).encode()
        for first in range(0, 50_000, 1000)
    )
    assert sum(len(batch.numbers) for batch in read_json_rows(blocks, choose, "names.jsonl")) == 50_000
    assert MOST_NAMES < max(seen) <= MOST_NAMES + 1002


def main(door: str, path: str, url: str) -> None:
    try:
        said = DOORS[door](Path(path), url)
    except VectormillError as error:
        said = str(error)
    # Unlike ru_maxrss, this begins with the program and not with the process that started it.
    (most,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps({"most_bytes": int(most) << 10, "said": said[:1000]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
