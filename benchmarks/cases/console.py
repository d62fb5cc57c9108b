"""console: how long a browser takes to paint the list of jobs, with few of them and with ten thousand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from playwright.sync_api import Browser, Page, sync_playwright
from sqlalchemy import Engine, text

from benchmarks.order import BenchmarkFailed, Order
from benchmarks.results.report import Report
from benchmarks.results.spread import Spread
from benchmarks.results.table import Measure, tabulate
from benchmarks.results.writing import write_seconds
from benchmarks.systems.own.own_api import OwnApi
from benchmarks.texts import list_lines
from tests.chromium import ARGUMENTS, NO_BROWSER, find_chromium
from vectormill.cli.stack import workplace
from vectormill.db.session import make_engine
from vectormill.files.ndjson import encode_parts

NUM_JOBS: Final = 10_000
VISITS: Final = 5
PAINT_TARGET_SECONDS: Final = 1.0
RATIO_TARGET: Final = 1.2

REPEAT_JOB: Final = text("""
    INSERT INTO vectormill.jobs (state, model, spec, priority, num_items, num_done, id, finished_at)
    SELECT 'completed', model, spec, priority, 4, 4, gen_random_uuid(), now()
      FROM (SELECT model, spec, priority FROM vectormill.jobs LIMIT 1) AS job, generate_series(1, :count)
""")
READ_TIMES: Final = """() => new Promise((tell) => new PerformanceObserver((list) => {
  const [paint] = list.getEntriesByName('first-contentful-paint');
  if (paint) tell([paint.startTime / 1000, performance.getEntriesByType('navigation')[0].responseEnd / 1000]);
}).observe({type: 'paint', buffered: true}))"""


@dataclass(frozen=True, slots=True)
class Visit:
    """Seconds from the click to the first paint, and to the answer's last byte."""

    paint: float
    answer: float


def measure(order: Order) -> Report:
    path = find_chromium()
    if path is None:
        raise BenchmarkFailed(NO_BROWSER)
    num_jobs = order.items or NUM_JOBS
    order.steps.begin("console", 3)
    order.steps.step("starting Postgres, the API and Chromium")
    with workplace(None) as directory, OwnApi(directory) as api, sync_playwright() as playwright:
        api.submit(list(encode_parts(list_lines(4))))
        engine = make_engine(api.database_url, application_name="benchmark")
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            url = f"{api.url}/console/jobs"
            visit(browser, url)  # what is made at first use
            order.steps.step("50 jobs")
            repeat_job(engine, 50)
            few = [visit(browser, url) for _ in range(order.repeat * VISITS)]
            order.steps.step(f"{num_jobs:,} jobs")
            repeat_job(engine, num_jobs)
            many = [visit(browser, url) for _ in range(order.repeat * VISITS)]
        finally:
            browser.close()
            engine.dispose()
    return judge_visits(few, many, num_jobs)


def repeat_job(engine: Engine, count: int) -> None:
    with engine.begin() as connection:
        connection.execute(REPEAT_JOB, {"count": count})


def visit(browser: Browser, url: str) -> Visit:
    """Of a browser that has seen nothing of the console: no file is in its cache."""
    page: Page = browser.new_page()
    try:
        page.goto(url)
        paint, answer = page.evaluate(READ_TIMES)
        return Visit(paint, answer)
    finally:
        page.close()


def judge_visits(few: Sequence[Visit], many: Sequence[Visit], num_jobs: int) -> Report:
    """The report on visits of a list of 50 jobs, and of a long one."""
    paint = Spread.of([each.paint for each in many])
    before = Spread.of([each.paint for each in few])
    measures = [
        Measure(
            f"first paint, {num_jobs:,} jobs",
            paint.describe(write_seconds),
            f"< {PAINT_TARGET_SECONDS:g} s",
            paint.median < PAINT_TARGET_SECONDS,
        ),
        Measure("first paint, 50 jobs", before.describe(write_seconds)),
        Measure(
            "the long list to the short one",
            f"{paint.median / before.median:.2f}×",
            f"≤ {RATIO_TARGET:g}×",
            paint.median <= RATIO_TARGET * before.median,
        ),
        Measure("the answer's last byte, 50 jobs", describe_answers(few)),
        Measure(f"the answer's last byte, {num_jobs:,} jobs", describe_answers(many)),
    ]
    return Report(
        "console",
        f"{len(many)} visits of the list of jobs in a headless Chromium, each with an empty cache.",
        (tabulate(measures),),
        (
            "From the start of the navigation to the first contentful paint, as the browser tells it. Browser, API and "
            "Postgres share the machine's cores; nothing is between them.",
            "The page shows 50 jobs at a time, and the first page is painted whole.",
        ),
    )


def describe_answers(visits: Sequence[Visit]) -> str:
    return Spread.of([each.answer for each in visits]).describe(write_seconds)
