"""A model of the Hugging Face hub for each need of a job, which refusals and documentation name. Asks no hub.

A model is named only if tests compare its layout, with weights of their own, with the code of its authors; how good
its published weights are is told by their page on the hub.
"""

from dataclasses import dataclass
from typing import Final

from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.task import EMBED, EXTRACT, JUDGE, MULTI_VECTOR, SPARSE


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A model for `need`, a task or an output. `test` compares its layout with the package `compared_with`.

    `conversion` writes the folder that can be added, if that cannot be fetched from the hub as it is.
    """

    need: str
    purpose: str
    hub_name: str
    compared_with: str
    test: str
    conversion: str = ""

    @property
    def name(self) -> str:
        """Return the name under which the model is registered without --name."""
        return self.hub_name.rpartition("/")[2]

    @property
    def command(self) -> str:
        return f"vectormill models add {f'./{self.name}' if self.conversion else self.hub_name}"


OUTPUTS_TEST: Final = "contract/test_representations_agree.py"
CLASSIFIERS_TEST: Final = "contract/test_classifiers_agree.py"
# The first row of a need is the one that a refusal names.
SUGGESTIONS: Final = (
    Suggestion(EMBED, "vectors of texts", "BAAI/bge-m3", "FlagEmbedding", OUTPUTS_TEST),
    Suggestion(SPARSE, "sparse vectors", "BAAI/bge-m3", "FlagEmbedding", OUTPUTS_TEST),
    # First the model that has every output, since a refusal may be of several.
    Suggestion(MULTI_VECTOR, "a vector for each token", "BAAI/bge-m3", "FlagEmbedding", OUTPUTS_TEST),
    Suggestion(
        MULTI_VECTOR,
        "a vector for each token, and no other output",
        "colbert-ir/colbertv2.0",
        "colbert-ai",
        OUTPUTS_TEST,
    ),
    Suggestion(
        JUDGE, "scores of pairs", "cross-encoder/ms-marco-MiniLM-L6-v2", "transformers", CLASSIFIERS_TEST
    ),
    Suggestion(
        JUDGE,
        "labels of single texts",
        "papluca/xlm-roberta-base-language-detection",
        "transformers",
        CLASSIFIERS_TEST,
    ),
    Suggestion(
        EXTRACT,
        "entities",
        "urchade/gliner_small-v2.1",
        "gliner",
        "contract/test_gliner_agrees.py",
        "from gliner import GLiNER; "
        "GLiNER.from_pretrained('urchade/gliner_small-v2.1').save_pretrained('gliner_small-v2.1')",
    ),
)


def suggest_model(need: str) -> str:
    """Return a sentence that names a model for the need, a task or an output, and the command that adds it."""
    row = next((row for row in SUGGESTIONS if row.need == need), None)
    if row is None:
        return ""
    first = f'`python -c "{row.conversion}"` where gliner is installed, and then ' if row.conversion else ""
    return f" For {need}, add for example {row.hub_name}: run {first}`{row.command}` where the API runs."


def find_need(options: EncodingOptions) -> str:
    """Return the task or the output that the options ask for; empty if most models have it."""
    named = (options.outputs or "").replace(" ", "").split(",")
    return options.task or next((name for name in (SPARSE, MULTI_VECTOR) if name in named), "")
