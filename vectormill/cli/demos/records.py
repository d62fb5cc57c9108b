"""The demo of `extract`: who, where, when and which organization, in some sentences of Chinese, marked in the text.

The published model of this kind, RexUniNLU, reads Chinese. No weights of it come with this package.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vectormill.cli.demos.task_demo import DemoModel, DemoReport, Json, Listing, Results, TaskDemo
from vectormill.domain.tasks.schema import Schema
from vectormill.domain.tasks.task import EXTRACT

if TYPE_CHECKING:
    from vectormill.client import Client
    from vectormill.files.ndjson import ItemJson

SCHEMA: Final[Schema] = {
    "人物": {"出生地": None, "作品": None},
    "地理位置": None,
    "时间": None,
    "组织机构": {"创始人": None},
}
SENTENCES: Final = (
    "居里夫人1867年出生于华沙,1903年与丈夫一起获得诺贝尔物理学奖。",
    "1998年,拉里·佩奇和谢尔盖·布林在加利福尼亚创办了谷歌公司。",
    "鲁迅原名周树人,1881年出生于浙江绍兴,是《狂人日记》的作者。",
    "2008年8月8日,第二十九届夏季奥林匹克运动会在北京开幕。",
    "爱因斯坦1879年出生于德国乌尔姆,1933年移居美国普林斯顿。",
    "艾伦·图灵1912年出生于伦敦,毕业于剑桥大学。",
    "埃菲尔铁塔位于法国巴黎,1889年建成。",
    "比尔·盖茨和保罗·艾伦于1975年创办了微软公司。",
    "长江全长六千三百多公里,在上海注入东海。",
    "曹雪芹生于南京,著有《红楼梦》。",
)
NUM_SHOWN: Final = 5
RANDOM: Final = "random-extractor"


def choose_weights(directory: Path) -> DemoModel:
    """Written into the directory: tiny and random ones, with the packaged model's tokenizer."""
    from vectormill.models.random_extractor import TINY, write_random_extractor
    from vectormill.models.registry import DEFAULT_MODEL, Registry

    tokenizer = Registry({}).card(DEFAULT_MODEL, weights=True).path
    return DemoModel(
        RANDOM,
        "no other is at hand",
        "No model that extracts comes with this package: the weights are tiny and random, and the records mean "
        "nothing. --model takes the directory of a RexUniNLU.",
        write_random_extractor(TINY, tokenizer, directory / RANDOM),
    )


def list_sentences(num_texts: int) -> "list[ItemJson]":
    """Again and again if need be; equal ones are read once."""
    return [
        {"key": f"text-{number + 1}", "text": SENTENCES[number % len(SENTENCES)]}
        for number in range(num_texts)
    ]


def read_records(client: "Client", job_id: str) -> Iterator[Json]:
    return client.records(job_id, partial=True)


def is_sound(result: Json) -> bool:
    """Return whether all records are paths of at least one step."""
    return all(step["type"] for record in result["output"] for step in record) and all(result["output"])


def find(items: Sequence["ItemJson"], results: Results) -> DemoReport:
    """Count the records of each type, and list some texts with their spans marked."""
    from vectormill.cli.views.spans import mark_spans

    paths = Counter(
        "/".join(step["type"] for step in record)
        for result in results.values()
        for record in result["output"]
    )
    # Those with something to show come first.
    there = [item for item in items if item["key"] in results]
    shown = sorted(there, key=lambda item: not results[item["key"]]["output"])[:NUM_SHOWN]
    return DemoReport(
        (
            Listing(
                "What was found", ("type", "records"), [(path, f"{paths[path]:,}") for path in sorted(paths)]
            ),
            Listing(
                "Some texts with their spans",
                ("", "text"),
                [(item["key"], mark_spans(item["text"], results[item["key"]]["output"])) for item in shown],
            ),
        ),
        {"records": dict(paths)},
    )


DEMO: Final = TaskDemo(
    task=EXTRACT,
    noun="text",
    num_items=len(SENTENCES),
    choose_weights=choose_weights,
    list_items=list_sentences,
    read_results=read_records,
    is_sound=is_sound,
    find=find,
    options={"extract_schema": json.dumps(SCHEMA, ensure_ascii=False)},
)
