"""Who may import whom, where import-linter cannot see it: at run time, and at module level only.

The contracts that import-linter checks are in pyproject.toml.
"""

import subprocess
import sys
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture.facts import SERVING_LIBRARIES
from tests.architecture.sources import (
    PACKAGES,
    ROOT,
    find_import_time_imports,
    find_imports_of,
    find_sources,
    parse,
)

# Together they take seconds to import; `vectormill --help` answers in 0.4 s.
HEAVY_LIBRARIES = {
    *SERVING_LIBRARIES,
    "alembic", "celery", "fastapi", "kombu", "numpy", "psycopg", "pyarrow", "pydantic", "sqlalchemy", "uvicorn",
}  # fmt: skip


# The modules of vectormill.models that evaluate what stands in a model's files.
READERS = frozenset(
    {
        "chat_templates", "classifiers", "gliner", "heads", "layouts", "model_files", "static_table", "tensor_headers",
        "transformer_card",
    }
)  # fmt: skip


def top_level(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def find_loaded_modules(program: str, of: str = "") -> frozenset[str]:
    """Top-level names in sys.modules after a fresh interpreter has run the program, or those of a package."""
    report = (
        f"\nimport sys\nprint('loaded', *{{name.removeprefix({of!r}).partition('.')[0] "
        f"for name in sys.modules if name.startswith({of!r})}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program + report], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return frozenset(done.stdout.rpartition("loaded ")[2].split())


def test_only_the_reading_process_and_model_processes_load_what_reads_a_models_files() -> None:
    """Other processes take what they need of a model from its card, and read only the JSON of its tokenizer."""
    modules = (
        "api.app, indexer.main, scheduler.main, vectormill.cli.app, worker.app, worker.launcher, worker.local"
    )
    loaded = find_loaded_modules(f"import {modules}", of="vectormill.models.")
    assert not loaded & READERS
    assert loaded & {"card_reader"}
    assert find_loaded_modules("import vectormill.models.card_process", of="vectormill.models.") >= READERS
    for library, places in {
        "jinja2": {"api/console/console.py", "vectormill/models/chat_templates.py"},
        "pickle": {"vectormill/models/tensor_headers.py", "worker/runner/channel.py"},
    }.items():
        importing = {
            str(path) for path in find_sources(*PACKAGES) if library in top_level(find_imports_of(path))
        }
        assert importing == places, f"what a stranger's {library} may do is bounded there"


def test_the_domain_imports_only_the_standard_library() -> None:
    foreign = [
        f"{path}: {name}"
        for path in find_sources("vectormill/domain")
        for name in sorted(find_imports_of(path))
        if name.partition(".")[0] not in sys.stdlib_module_names and not name.startswith("vectormill.domain")
    ]
    assert foreign == [], "the edges translate: hand the domain plain values"


def test_no_module_imports_itself_through_others_be_it_inside_a_function() -> None:
    modules = {str(path.with_suffix("")).replace("/", "."): path for path in find_sources(*PACKAGES)}
    graph = {name: find_imports_of(path) & modules.keys() for name, path in modules.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_what_all_share_loads_neither_api_nor_scheduler_nor_worker() -> None:
    loaded = [
        f"{path}: {name}"
        for path in find_sources("vectormill")
        for name in find_import_time_imports(parse(path))
        if name.partition(".")[0] in {"api", "indexer", "scheduler", "worker"}
    ]
    assert loaded == [], "import it inside the function that needs it"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("api.app", "the API runs on machines without a device, and starts in a second"),
        ("scheduler", "the scheduler has nothing to encode"),
        ("worker.app", "the Celery process owns no CUDA: the model lives in spawned runner processes"),
        ("worker.engine.engine", "the engine outlives a runner that a CUDA error killed"),
        ("worker.launcher", "it sets a child's environment before anything in that child imports torch"),
        ("worker.batching", "batches are planned from lengths alone"),
        ("worker.tasks.extract.extraction", "prompts are written and records read off the device's process"),
        ("vectormill.domain.schema", "the API checks a schema where no device is"),
    ],
)
def test_a_process_that_owns_no_device_never_loads_the_model_libraries(module: str, reason: str) -> None:
    assert not find_loaded_modules(f"import {module}") & set(SERVING_LIBRARIES), reason


@pytest.mark.parametrize(
    ("module", "absent", "reason"),
    [
        (
            "worker.runner.runner_process",
            {"openvino", "torch", "pydantic", "asyncio"},
            "what an order asks for",
        ),
        (
            "worker.openvino.encoder",
            {"torch", "transformers", "pydantic", "openvino_telemetry"},
            "a kept conversion needs neither",
        ),
    ],
)
def test_a_model_process_holds_only_what_its_backend_needs(
    module: str, absent: set[str], reason: str
) -> None:
    assert not find_loaded_modules(f"import {module}, worker.encoder.backends") & absent, reason


def test_a_model_process_of_torch_loads_its_compiler_when_somebody_compiles_and_not_before() -> None:
    program = """
import sys
import worker.model.torch_encoder
from worker.model.runtime import transformers
early = {"torch._dynamo", "torch._inductor", "scipy"} & set(sys.modules)
assert not early, early
import torch._dynamo
assert torch._dynamo.config.recompile_limit
real = sys.modules["torch._dynamo._trace_wrapped_higher_order_op"].TransformGetItemToIndex
assert isinstance(transformers.masking_utils.TransformGetItemToIndex(), real)
"""
    find_loaded_modules(program)


def test_a_model_process_starts_beside_torchvision_which_needs_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("from torch._dynamo.utils import is_compile_supported")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from worker.model.runtime import transformers
from transformers.utils import is_torchvision_available
assert is_torchvision_available()
assert "torchvision" not in sys.modules
"""
    find_loaded_modules(program)


def test_who_names_no_collector_loads_nothing_of_traces() -> None:
    # redis-py and FastAPI look for the SDK by themselves; what sends anything is ours alone.
    find_loaded_modules(
        "import sys, api.app, worker.app, scheduler.main\nassert 'opentelemetry.exporter' not in sys.modules"
    )
    users = {
        str(path)
        for path in find_sources(*PACKAGES)
        if any(name.startswith("opentelemetry") for name in find_imports_of(path))
    }
    assert users == {"vectormill/tracing.py"}


def test_one_file_asks_the_driver_for_gpus() -> None:
    assert find_importers("worker.devices.nvml") == {"worker/devices/detect.py"}
    assert find_importers("worker.devices.kfd") == {"worker/devices/detect.py"}
    assert find_importers("pynvml") == {"worker/devices/nvml.py"}


def find_importers(module: str) -> set[str]:
    return {str(path) for path in find_sources(*PACKAGES) if module in find_imports_of(path)}


def test_the_command_line_answers_help_without_loading_anything_heavy() -> None:
    program = (
        "import sys\n"
        "sys.argv = ['vectormill', '--help']\n"
        "from vectormill.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code"
    )
    assert not find_loaded_modules(program) & HEAVY_LIBRARIES


def test_every_folder_of_code_is_a_package() -> None:
    folders = {path.parent for package in PACKAGES for path in find_sources(package)}
    missing = [str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").exists()]
    assert not missing, (
        "without __init__.py the import contracts do not see a folder, and it is not installed"
    )
