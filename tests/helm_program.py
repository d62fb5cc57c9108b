"""A program that renders or lints the chart with Helm: it reads JSON from stdin and writes JSON to stdout.

It is a process of its own because Helm is a Go library, whose runtime takes over the signals of the process
that loads it. That has ended test processes that had done much else before.
"""

import json
import sys
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy/helm/vectormill"


def main() -> None:
    asked = json.load(sys.stdin)
    try:
        if asked["act"] == "lint":
            answer: dict[str, Any] = {"report": helm_python.lint(CHART, asked["values"])}
        else:
            with helm_python.Chart.load(CHART) as chart:
                manifests = chart.render(asked["values"], name=asked["name"], namespace=asked["namespace"])
            documents = [
                document
                for path, text in sorted(manifests.items())
                if path.endswith(".yaml")
                for document in yaml.safe_load_all(text)
                if document
            ]
            answer = {"documents": documents}
    except helm_python.HelmError as error:
        answer = {"refusal": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
