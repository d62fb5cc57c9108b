"""CheckReport: what a check found, as a table and sentences for a person. Prints on stdout, knows no command."""

from collections.abc import Iterator, Mapping
from typing import Any

import typer

from vectormill.cli.views.listing import print_report


def print_check(collection: str, report: Mapping[str, Any]) -> None:
    print_report(
        f"Check of {collection}, generation {report['generation']}",
        ("looked at", "found", ""),
        list(_describe(report)),
    )
    for problem in report["problems"]:
        typer.echo(f"Wrong: {problem}")
    for sentence in report["unchecked"]:
        typer.echo(f"Not checked. {sentence}")
    if report["is_good"]:
        typer.echo("Nothing is wrong.")


def _describe(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    yield from _describe_results(report)
    recall = report["recall"]
    if recall is not None:
        yield (
            f"recall@{recall['limit']}",
            f"{recall['value']:.4f}",
            f"{recall['index']}, {recall['num_queries']} queries against an exact search",
        )
    texts = report.get("texts")
    if texts and texts["num_compared"]:
        agreement = f"agree to {texts['smallest']:.5f} at the worst, {texts['mean']:.5f} in the mean"
        yield "texts encoded again", f"{texts['num_compared']:,}", f"{agreement}; {texts['reason']}"
    hashes = report["hashes"]
    if hashes["num_compared"]:
        yield "hashes of kept texts", f"{hashes['num_compared']:,}", f"{hashes['num_differing']:,} differ"
    strays = report["strays"]
    num_strays = strays["num_attributes_without_row"] + strays["num_rows_of_deleted_keys"]
    yield "strays", f"{num_strays:,}", f"the view reads {strays['view_reads']}"


def _describe_results(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Of whichever kind the collection is."""
    if vectors := report.get("vectors"):
        num_broken = vectors["num_not_finite"] + vectors["num_zero"] + vectors["num_odd_norms"]
        norms = ""
        if vectors["smallest_norm"] is not None:
            norms = f"lengths from {vectors['smallest_norm']:.4f} to {vectors['largest_norm']:.4f}"
        yield "vectors", f"{vectors['num_rows']:,} rows, {num_broken:,} unsound", norms
    if scores := report.get("scores"):
        scale = ""
        if scores["smallest"] is not None:
            scale = f"from {scores['smallest']:.4f} to {scores['largest']:.4f}"
        yield "scores", f"{scores['num_rows']:,} rows, {scores['num_broken']:,} unsound", scale
    if records := report.get("records"):
        found = f"{records['num_rows']:,} rows, {records['num_broken']:,} unsound"
        yield "records", found, f"nothing was found in {records['num_empty']:,}"
