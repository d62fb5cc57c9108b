"""Write what docs and code repeat from tables in the code: `python -m tests.architecture.derived`.

All content between <!-- name --> and <!-- end --> (in code # <name> and # <end>) is generated, a table or a
few words. In other tables a person writes the last columns: a new entry gets a row with these columns empty,
which a test refuses; the row of a removed entry is removed; and the columns that the code knows are
overwritten.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from typing import Final

from api.door.scopes import OPERATIONS
from benchmarks.tables import closing_marker, opening_marker
from tests.architecture.chart import draw_bars
from tests.architecture.facts import (
    SERVING_LIBRARIES,
    describe_default,
    describe_wishes,
    find_dependencies,
    find_metrics,
    find_settings,
)
from tests.architecture.sources import ROOT
from tests.states import ALL_JOB_STATES, CHUNK_STATES
from vectormill.cli.command import find_flag
from vectormill.collections import collection
from vectormill.domain.encoding import EncodingOptions, RequestedOptions
from vectormill.domain.options import list_options
from vectormill.domain.task import EMBED, EXTRACT, JUDGE
from vectormill.domain.vector_type import VECTOR_TYPES
from vectormill.files.formats import INPUT_FORMATS, OUTPUT_FORMATS, describe_inputs
from vectormill.jobs.item import ITEM_ERROR_CODES
from vectormill.jobs.job import RequestedJob
from vectormill.jobs.transitions import TRANSITIONS
from vectormill.keys.api_key import ADMIN, READ, SCOPES
from vectormill.models.families import CONVENTIONS, FAMILIES, Family, find_family
from vectormill.models.gliner import MOST_TOKENS
from vectormill.models.model_card import GLINER, REXUNINLU
from vectormill.models.model_files import VERSIONS, WITHOUT_INFLUENCE
from vectormill.models.poolings import (
    MODULE_PURPOSES,
    POOLING_NAMES,
    PROMPTED_FAMILIES,
    PURPOSES,
    REPOSITORY_CODE,
)
from vectormill.models.rerankers import RERANKERS
from vectormill.models.static_table import DEFAULT_MAX_TOKENS, MODEL_TYPE, MODULE
from vectormill.models.suggestions import SUGGESTIONS
from vectormill.models.transformer_card import REXUNINLU_TYPE
from vectormill.runs import run
from vectormill.sources.source import KINDS
from worker.certificates.certificate import PROMISE_INT8
from worker.devices.backends import BACKENDS
from worker.encoder.choice import NUMPY, PRECISIONS
from worker.encoder.encoder import AUTO
from worker.placement.strategies import REPLICATE, SHARED, STRATEGIES
from worker.tasks.finishing import PROMISE, PROMISE_FP8, PROMISE_FP32

# A function from the text of a page to its new text.
Rewrite = Callable[[str], str]

# A row whose last cell is empty, for a person to fill.
EMPTY_CELL: Final = re.compile(r"^\|.*\|  \|$", re.MULTILINE)


def fill(name: str, content: str) -> Rewrite:
    """Return a rewrite that replaces the content between the marks of this name."""
    marks = re.compile(
        rf"(?<=<!-- {name} -->)(.*?)(?=<!-- end -->)|(?<=# <{name}>\n)(.*?)(?= *# <end>)", re.DOTALL
    )

    def rewrite(text: str) -> str:
        assert marks.search(text), f"there is no mark {name}"
        return marks.sub(lambda _: content, text)

    return rewrite


def reword(before: str, words: str, after: str) -> Rewrite:
    """Return a rewrite of what stands between two strings, each of which occurs once."""

    def rewrite(text: str) -> str:
        start, _, rest = text.partition(before)
        old, _, end = rest.partition(after)
        assert old, f"there is no {before}…{after}"
        assert end, f"there is no {before}…{after}"
        return f"{start}{before}{words}{after}{end}"

    return rewrite


def choose_in_chart(text: str) -> str:
    """Return the schema of the chart's values with the precisions and strategies that a worker takes."""
    schema = json.loads(text)
    worker = schema["$defs"]["worker"]["properties"]
    worker["precision"]["enum"] = [AUTO, *PRECISIONS]
    worker["strategy"]["enum"] = [AUTO, *STRATEGIES]
    return json.dumps(schema, indent=2) + "\n"


def say(names: Iterable[str], last: str = "or") -> str:
    *others, final = names
    return f"{', '.join(others)} {last} {final}"


def keep_rows(
    rows: Mapping[str, Sequence[str]], *, like: str = "`{}`", begins: str = "", section: str = ""
) -> Rewrite:
    """Return a rewrite of Markdown tables that makes one row for each key of `rows`.

    The first cell of such a row is the key, formatted by `like`; the cells of `rows` follow, and the others
    stay as they are. A new row follows that of the previous key. Keys match the pattern `begins`. With
    `section` only the first table after that heading is rewritten, else all of the page.
    """
    opening, closing = (re.escape(part) for part in like.split("{}"))
    pattern = re.compile(rf"^\| {opening}((?={begins})[\w-]+){closing} \|.*\|$")
    num_made = len(next(iter(rows.values())))

    def rewrite_lines(lines: list[str]) -> list[str]:
        places = {match[1]: place for place, line in enumerate(lines) if (match := pattern.match(line))}
        assert places, f"no row of a table is like {pattern.pattern}"
        kept = {name: split_row(lines[place])[1 + num_made :] for name, place in places.items()}
        written: dict[int, list[str]] = {place: [] for place in places.values()}
        place = min(written)
        for name, cells in rows.items():
            place = places.get(name, place)
            rest = kept.get(name) or [""] * len(next(iter(kept.values())))
            written[place].append(join_row([like.format(name), *cells, *rest]))
        return [each for place, line in enumerate(lines) for each in written.get(place, [line])]

    def rewrite(text: str) -> str:
        lines = text.split("\n")
        start = lines.index(section) if section else 0
        first = next(place for place in range(start, len(lines)) if lines[place].startswith("|"))
        end = lines.index("", first) if section else len(lines)
        return "\n".join([*lines[:first], *rewrite_lines(lines[first:end]), *lines[end:]])

    return rewrite


def split_row(line: str) -> list[str]:
    return [cell.strip() for cell in line[1:-1].split(" | ")]


def join_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(rows: Iterable[Sequence[str]]) -> str:
    head, *others = rows
    return "".join(f"\n{join_row(line)}" for line in (head, ("---",) * len(head), *others)) + "\n"


def quote(names: Iterable[str], last: str = "") -> str:
    """Return the names in backticks, separated by commas, with the word `last` before the last one."""
    *others, final = (f"`{name}`" for name in names)
    return f"{', '.join(others)}{f' {last} ' if last else ', '}{final}" if others else final


def join_strings(values: Iterable[str]) -> str:
    return ", ".join(f'"{value}"' for value in values)


def literal(name: str, values: Iterable[str]) -> str:
    return f"{name} = Literal[{join_strings(values)}]\n"


def forbid(*more: str) -> str:
    return f"forbidden_modules = [{join_strings([*SERVING_LIBRARIES, *more])}]\n"


def make_options(options: type[object]) -> str:
    rows = [
        (
            f"`{option.name}`",
            option.help.default if option.default is None else f"`{describe_value(option.default)}`",
            option.help.description,
        )
        for option in list_options(options)
    ]
    return table([("option", "default", "meaning"), *rows])


def make_source_options() -> str:
    """Return the options of all kinds of sources, each once, with the kinds that have it."""
    options = {option.name: option for kind in KINDS.values() for option in list_options(kind)}
    rows = []
    for name, option in options.items():
        kinds = [kind for kind in KINDS if option in list_options(KINDS[kind])]
        has_default = option.default not in (None, MISSING, (), False)
        default = "required" if option.default is MISSING else "no" if option.kind is bool else "none"
        shown = option.default if not isinstance(option.default, tuple) else ", ".join(option.default)
        told = (f"`{find_flag(option)}`", ", ".join(kinds), f"`{shown}`" if has_default else default)
        rows.append((f"`{name}`", *told, option.help.description))
    return table([("option", "flag", "kinds", "default", "meaning"), *rows])


def describe_value(value: object) -> str:
    """Return a value as JSON has it, but a text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def make_arguments(options: type[object]) -> str:
    """Return the fields of a TypedDict of these options."""
    return "".join(f"    {option.name}: {option.kind.__name__} | None\n" for option in list_options(options))


def make_scopes() -> str:
    """Return what each scope permits besides what the one before it does, request by request."""
    rows = [("scope", "requests")]
    for scope in (None, *SCOPES):
        of_scope = {
            (each.method, re.sub(r":\w+}", "}", each.path)) for each in OPERATIONS if each.scope == scope
        }
        told = sorted(f"`{method} {path}`" for method, path in of_scope if scope != READ or method != "GET")
        others = {READ: ["every other `GET`"], ADMIN: ["what is in no other row, and all of them"]}.get(
            scope or "", []
        )
        rows.append((f"`{scope}`" if scope else "none needed", ", ".join(others + told)))
    return table(rows)


def make_transitions() -> str:
    rows = [(each.event, quote(each.leaves, "or"), f"`{each.enters}`") for each in TRANSITIONS]
    return table([("what happens to a chunk", "from", "to"), *rows])


def make_backends() -> str:
    rows = [
        (
            f"`{backend.name}`",
            "all" if backend.only_kind is None else f"`{backend.only_kind}`",
            "yes" if backend.has_packed_attention else "no",
        )
        for backend in BACKENDS.values()
    ]
    return table([("backend", "devices", "packed attention"), *rows])


COLUMNS: Final = (
    "model", "task", "pooling", "prompt", "window", "attends", "backends", "packed", "queued", "shared", "promise",
)  # fmt: skip


def make_families() -> str:
    """Return all that runs, a row for each: the families of transformers, extractors and static embeddings."""
    rows = [COLUMNS, *map(describe_family, FAMILIES.values()), *describe_others()]
    assert all(map(all, rows)), "a cell is empty"
    return table(rows)


def describe_family(family: Family) -> tuple[str, ...]:
    rerankers = [f"`{row.name}`" for row in RERANKERS if row.model_type == family.model_type]
    scores = ["cosine", *([f"a head (`{family.head_pooling}`)"] if family.head_pooling else []), *rerankers]
    named = [row.name for row in PROMPTED_FAMILIES if family.model_type in row.model_types]
    return (
        f"`{family.model_type}`",
        f"`{EMBED}`{', the encoder alone' if family.encoder else ''}; `{JUDGE}` by {', '.join(scores)}",
        "of its files, else mean" if family.bare else "of its files",
        f"of its files; by name {', '.join(named)}" if named else "of its files",
        "its tokenizer's limit"
        if family.encoder
        else f"its positions{' behind the padding id' if family.has_offset else ''}",
        "to the left" if family.is_causal else "both ways",
        f"`torch`; not `openvino`: {family.openvino_obstacle}"
        if family.openvino_obstacle
        else quote(BACKENDS),
        "yes" if family.positions else join_reason(family.packing_obstacle),
        answer(family.never_waits),
        answer(family.layout is not None),
        join_promises(PROMISE_FP32, PROMISE, PROMISE_INT8, *([PROMISE_FP8] if family.positions else [])),
    )


def describe_others() -> Iterator[tuple[str, ...]]:
    """Yield the rows of models that run without a backend of the table."""
    rex = find_family(REXUNINLU_TYPE)
    of_rex = join_reason(rex.packing_obstacle), answer(rex.never_waits), answer(rex.layout is not None)
    for name, window, *batches in (
        (REXUNINLU, "its positions", *of_rex),
        (GLINER, f"its positions, at most {MOST_TOKENS}", "no", "as its family", "no"),
    ):
        yield (name, f"`{EXTRACT}`", "none", "none", window, "both ways", "`torch`", *batches, "none")
    task, packed = f"`{EMBED}`; `{JUDGE}` by cosine", join_reason("each text is added up alone")
    for name, window in (
        (MODEL_TYPE, f"`max_length`, else {DEFAULT_MAX_TOKENS}"),
        (MODULE, "its tokenizer's limit"),
    ):
        cells = ("mean", "of its files", window, "no token", f"`{NUMPY}`", packed, "no", "no")
        yield (name, task, *cells, join_promises(PROMISE_FP32))


def answer(holds: bool) -> str:
    return "yes" if holds else "no"


def join_reason(why_not: str) -> str:
    return f"no: {why_not}" if why_not else "no"


def join_promises(*promises: float) -> str:
    return ", ".join(f"{promise:g}" for promise in promises)


def make_conventions() -> str:
    rows = [(f"`{architecture}`", why) for architecture, why in sorted(CONVENTIONS.items())]
    return table([("architecture", "why its mean is pooled"), *rows])


def make_prompted() -> str:
    rows = [
        (family.name, quote(family.prompts, "or"), "yes" if family.includes_prompt else "no")
        for family in PROMPTED_FAMILIES
    ]
    return table([("family", "prompt", "pooled over too"), *rows])


def make_rerankers() -> str:
    rows = [
        (
            f"`{row.name}`",
            quote(row.names, "or"),
            " minus ".join(f"`{word}`" for word in row.template.words),
            row.template.instruction or "none",
            row.source,
        )
        for row in RERANKERS
    ]
    return table([("template", "by name", "score", "default prompt", "as in"), *rows])


def make_without_influence() -> str:
    """Return the keys of sentence-transformers' files that no result depends on, with the reason."""
    places = (("all of them", VERSIONS), *WITHOUT_INFLUENCE.items())
    rows = [(place, f"`{key}`", why) for place, keys in places for key, why in keys.items()]
    return table([("file or module", "key", "why no result depends on it"), *rows])


def make_suggestions() -> str:
    rows = [
        (
            f"`{row.need}`",
            row.purpose,
            f"`{row.command}`{' ([conversion](RECORDS.md#gliner))' if row.conversion else ''}",
            f"{row.compared_with} (`tests/{row.test}`)",
        )
        for row in SUGGESTIONS
    ]
    return table([("task or output", "gives", "a model", "layout compared with"), *rows])


def make_conversion() -> str:
    """Return the commands that add the suggested extractor."""
    row = next(row for row in SUGGESTIONS if row.need == EXTRACT)
    extract = f"vectormill extract texts.jsonl --schema schema.json -o records.jsonl --model {row.name}"
    lines = (f'uv run --no-project --with gliner python -c "{row.conversion}"', row.command, extract)
    return "".join(f"{line}\n" for line in ("", "```sh", *lines, "```"))


def make_refused() -> str:
    rows = [(f"`…{ending}`", purpose) for ending, purpose, _ in PURPOSES]
    rows += [(f"`{beginning}…`", f"{what}: {way}") for beginning, _, what, way in REPOSITORY_CODE]
    rows += [(f"`{module}`", purpose) for module, purpose in MODULE_PURPOSES.items()]
    return table([("architecture or module", "what it is"), *rows])


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8") if (ROOT / page).exists() else ""


def make_speed() -> str:
    """Return the table of speed in docs/COMPARISON.md, from the latest tables of the benchmarks."""
    ours, peer = read_row("main_job", "ours, end to end"), read_row("main_job", "sentence-transformers")
    server, other = (
        read_row("queries", "ours, 64 clients"),
        read_row("queries", "infinity's server, 64 clients"),
    )
    ratio = ours["to the peer"].partition(" ")[0]
    rows = (
        ("", "Vectormill", "compared with"),
        (
            "docstrings per second",
            f"{ours['texts/s']}, committed to Postgres ({ratio})",
            f"{peer['texts/s']}, in memory, by `SentenceTransformer.encode`",
        ),
        ("padding", ours["padding"], peer["padding"]),
        (
            "queries per second from 64 clients",
            server["requests/s"],
            f"{other['requests/s']}, by infinity's server",
        ),
        ("99th percentile of their latency", server["p99"], other["p99"]),
    )
    return table(rows)


def read_section(benchmark: str) -> str:
    """Return what a benchmark has written into its README."""
    page = read("benchmarks/README.md")
    return page.partition(opening_marker(benchmark))[2].partition(closing_marker(benchmark))[0]


def read_row(benchmark: str, system: str) -> Mapping[str, str]:
    """Return a system's row in a benchmark's section of the README: column -> cell."""
    head: list[str] = []
    for line in read_section(benchmark).split("\n"):
        cells = split_row(line) if line.startswith("|") else []
        if cells[1:2] in (["texts/s"], ["requests/s"], ["time"]):
            head = cells
        elif cells[:1] == [system]:
            return dict(zip(head, cells, strict=True))
    raise LookupError(f"{benchmark} has no row {system}")


CHARTED: Final = (
    ("ours, end to end", "Vectormill, committed"),
    ("sentence-transformers", "sentence-transformers"),
    ("sentence-transformers, OpenVINO", "… with OpenVINO"),
    ("sentence-transformers, ONNX", "… with ONNX"),
    ("infinity, torch", "infinity"),
    ("infinity, optimum", "… with ONNX"),
)


def make_chart() -> str:
    """Return the README's chart, from the first table of the benchmark `engine`."""
    section = read_section("engine")
    machine = next(line for line in section.split("\n") if "matrix product" in line)
    bars = []
    for system, name in CHARTED:
        found = read_row("engine", system)
        rate = found["texts/s"].partition(" ")[0]
        ratio = found["to the peer"].partition(" ")[0]
        bars.append((name, float(rate), f"{rate} a second ({ratio})"))
    return draw_bars(
        "Paragraphs of docstrings, all-MiniLM-L6-v2, on two cores",
        f"{machine.partition(',')[0]}, AVX2, one run; some 105 tokens each, same vectors; benchmarks/README.md, engine",
        bars,
    )


DERIVED: Final[tuple[tuple[str, Rewrite], ...]] = (
    ("docs/COMPARISON.md", fill("speed", make_speed())),
    ("docs/pictures/speed.svg", lambda _: make_chart()),
    ("docs/CONFIGURATION.md", fill("job options", make_options(RequestedJob))),
    ("docs/CONFIGURATION.md", fill("options", make_options(RequestedOptions))),
    ("docs/COLLECTIONS.md", fill("run options", make_options(run.RunOptions))),
    ("docs/CONFIGURATION.md", fill("backends", make_backends())),
    ("docs/CONFIGURATION.md", fill("poolings", quote(POOLING_NAMES))),
    ("docs/CONFIGURATION.md", fill("templates", quote(row.name for row in RERANKERS))),
    ("docs/CONFIGURATION.md", fill("strategies", quote(STRATEGIES, "or"))),
    (
        "docs/CONFIGURATION.md",
        keep_rows(
            {name: [describe_default(field)] for name, field in find_settings().items()}, begins="VECTORMILL_"
        ),
    ),
    (
        "docs/DEPENDENCIES.md",
        keep_rows({name: [] for name in find_dependencies()}, like="{}", begins=r"(?!package )[A-Za-z]"),
    ),
    (
        "docs/ERRORS.md",
        keep_rows({code: [why] for code, why in ITEM_ERROR_CODES.items()}, section="## Items"),
    ),
    (
        "docs/MONITOR.md",
        fill(
            "metrics",
            table(
                [
                    ("metric", "labels", "meaning"),
                    *((f"`{name}`", *told) for name, told in find_metrics().items()),
                ]
            ),
        ),
    ),
    ("docs/SECURE.md", fill("scopes", make_scopes())),
    ("docs/MODELS.md", fill("families", make_families())),
    ("docs/MODELS.md", fill("suggestions", make_suggestions())),
    ("docs/MODELS.md", fill("without influence", make_without_influence())),
    ("docs/MODELS.md", fill("conventions", make_conventions())),
    ("docs/MODELS.md", fill("prompted", make_prompted())),
    ("docs/MODELS.md", fill("refused", make_refused())),
    ("docs/SCORES.md", fill("rerankers", make_rerankers())),
    ("docs/RECORDS.md", fill("gliner", make_conversion())),
    ("docs/SOURCES.md", fill("formats", describe_inputs())),
    ("docs/SOURCES.md", fill("options", make_source_options())),
    *(
        ("docs/STATES.md", keep_rows({state: [] for state in states}, section=heading))
        for heading, states in (
            ("## Job", ALL_JOB_STATES),
            ("## Chunk", CHUNK_STATES),
            ("## Generation", collection.GENERATION_STATES),
            ("## Run", run.RUN_STATES),
        )
    ),
    ("docs/STATES.md", fill("wishes", table(describe_wishes()))),
    ("docs/STATES.md", fill("transitions", make_transitions())),
    ("pyproject.toml", fill("model libraries", forbid())),
    ("pyproject.toml", fill("model libraries and safetensors", forbid("safetensors"))),
    ("deploy/helm/vectormill/values.schema.json", choose_in_chart),
    ("vectormill/cli/estimate.py", reword("strategy: The strategy: ", say([AUTO, *STRATEGIES]), ".\n")),
    (
        "vectormill/cli/certify.py",
        reword("strategy: Measure only this placement: ", say([REPLICATE, *SHARED]), ". By default"),
    ),
    ("vectormill/domain/encoding.py", fill("options", make_arguments(EncodingOptions))),
    ("vectormill/jobs/job.py", fill("options", make_arguments(RequestedJob))),
    ("vectormill/runs/operations.py", fill("options", make_arguments(run.ReindexOptions))),
    (
        "vectormill/files/formats.py",
        fill(
            "names",
            literal("InputName", (row.name for row in INPUT_FORMATS))
            + literal("OutputName", OUTPUT_FORMATS)
            + literal("RowsName", (name for name, row in OUTPUT_FORMATS.items() if row.has_keys)),
        ),
    ),
    (
        "vectormill/domain/vector_type.py",
        fill("vector types", literal("VectorTypeName", VECTOR_TYPES)),
    ),
    # A chart is packaged by itself, so a link to a file outside it would break; the file is copied instead.
    ("deploy/helm/vectormill/files/alerts.yml", lambda _: read("deploy/prometheus/alerts.yml")),
)
PAGES: Final = tuple(dict.fromkeys(page for page, _ in DERIVED))


def rewrite(page: str, text: str) -> str:
    """Return the text of a page with all generated parts written anew."""
    for name, make in DERIVED:
        if name == page:
            text = make(text)
    return text


def main() -> None:
    for page in PAGES:
        (ROOT / page).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / page).write_text(rewrite(page, read(page)), encoding="utf-8")


if __name__ == "__main__":
    main()
