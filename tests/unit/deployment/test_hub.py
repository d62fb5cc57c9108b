"""Models on the hub, which a server on the loopback plays: what is fetched, and what is refused before that."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from tests.unit.deployment.test_registry import modules, write_model

COMMIT: Final = "5617a9f61b028005a4858fdac845db406aefb181"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as fetches the files of one model, which its server holds by name."""

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(None)

    def _answer(self, body: bytes | None) -> None:
        files: dict[str, bytes] = self.server.files  # type: ignore[attr-defined]
        path = self.path.split("?")[0]
        if path.startswith("/api/models/"):
            entries = [
                {"type": "file", "path": name, "size": len(files[name]), "oid": "0" * 40} for name in files
            ]
            siblings = [{"rfilename": name} for name in files]
            about = {"id": "some-org/some-model", "sha": COMMIT, "siblings": siblings}
            content = json.dumps(entries if "/tree/" in path else about).encode()
        else:
            name = path.partition(f"/resolve/{COMMIT}/")[2]
            content = files.get(name, b"")
            self.server.fetched.append(name)  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        self.wfile.write(content if body is None else body)

    def log_message(self, *arguments: object) -> None:
        """Write nothing."""


@contextmanager
def serving_hub(directory: Path, *left_out: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield the environment of a process that asks a hub with the directory's files, and the names that it fetched."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    files = {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in left_out
    }
    fetched: list[str] = []
    server.files, server.fetched = files, fetched  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield {"HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1"}, fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask_registry(environment: dict[str, str], home: Path, *, weights: bool) -> str:
    """In a process of its own, since huggingface_hub reads its environment when it is imported."""
    code = (
        "from vectormill.models.registry import Registry; from vectormill.settings import ModelEntry\n"
        "from vectormill.domain.errors import VectormillError\n"
        "registry = Registry({'m': ModelEntry(path='some-org/some-model')})\n"
        f"try: card = registry.card('m', weights={weights}); print(card.revision, card.num_parameters)\n"
        "except VectormillError as error: print(type(error).__name__, error)\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**kept, **environment, "HF_HOME": str(home)}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_model_on_the_hub_without_safetensors_is_fetched_with_the_pickle_that_torch_wrote(
    tmp_path: Path,
) -> None:
    """As BAAI/bge-m3 is published."""
    import torch

    model = write_model(
        tmp_path / "model", modules=modules("Transformer", "Pooling"), **{"1_Pooling__config": {}}
    )
    (model / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(4)}, model / "pytorch_model.bin")
    torch.save({"weight": torch.zeros(3, 4)}, model / "colbert_linear.pt")
    with serving_hub(model) as (environment, fetched):
        assert ask_registry(environment, tmp_path / "api", weights=False) == f"{COMMIT} None"
        assert "pytorch_model.bin" not in fetched
        assert "colbert_linear.pt" in fetched, "the size of its head is part of the card"
        assert ask_registry(environment, tmp_path / "worker", weights=True) == f"{COMMIT} 4"
        assert "pytorch_model.bin" in fetched


def test_a_model_on_the_hub_that_no_worker_can_load_is_refused_from_its_list_of_files(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "model.onnx").write_bytes(b"onnx")
    with serving_hub(model, "model.safetensors") as (environment, _):
        answer = ask_registry(environment, tmp_path / "api", weights=False)
    assert answer.startswith("UnsupportedModel The model 'some-org/some-model' has no *.safetensors")
    assert "found model.onnx" in answer


def test_a_model_on_the_hub_without_a_tokenizer_is_refused_before_its_weights_are_fetched(
    tmp_path: Path,
) -> None:
    with serving_hub(write_model(tmp_path / "model"), "tokenizer.json") as (environment, _):
        answer = ask_registry(environment, tmp_path / "api", weights=False)
    assert "has no tokenizer.json" in answer
