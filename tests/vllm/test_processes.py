"""vLLM's OpenAI server, with an engine core and two tensor-parallel workers in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_canary.difftest.stress.vllm.engine import BLOCK, LONGEST

from .models import tokenizer

Model = Callable[[str], str]
# Seconds in which three processes import vLLM one after the other.
STARTS = 400


def free_ports(count: int) -> list[int]:
    """Return the first of so many ports in a row that nobody listens on."""
    for first in range(21000, 29000, 100):
        try:
            for port in range(first, first + count):
                with socket.socket() as tried:
                    tried.bind(("127.0.0.1", port))
        except OSError:
            continue
        return list(range(first, first + count))
    raise RuntimeError("no ports are free")


class Server:
    """The server, from its start on.

    Args:
        model: folder of a checkpoint with a tokenizer.
        log: where its processes write to.
        environ: variables.
    """

    def __init__(self, model: str, log: Path, **environ: str) -> None:
        self._port, *self.metrics = free_ports(3)
        arguments = {
            "--model": model,
            "--host": "127.0.0.1",
            "--port": self._port,
            "--dtype": "float32",
            "--max-model-len": LONGEST,
            "--block-size": BLOCK,
            "--kv-cache-memory-bytes": 8 << 20,
            "--max-num-seqs": 6,
            "--max-num-batched-tokens": 96,
            "--tensor-parallel-size": 2,
        }
        clean = {name: text for name, text in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        self._log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
            + [str(part) for pair in arguments.items() for part in pair],
            env={
                **clean,
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_LOGGING_LEVEL": "INFO",
                # A core for each rank, as far as there are so many.
                "VLLM_CPU_OMP_THREADS_BIND": "{}|{}".format(*(sorted(os.sched_getaffinity(0)) * 2)[:2]),
                "TORCH_COMPILE_DISABLE": "1",
                "KV_CANARY_MODE": "log",
                "KV_CANARY_METRICS_PORT": str(self.metrics[0]),
                **environ,
            },
            # Not from the checkout, whose folders would be packages there.
            cwd=log.parent,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def call(self, path: str, body: dict[str, Any] | None = None, *, port: int | None = None) -> str:
        """Return what the server answers."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{port or self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text: str = answer.read().decode()
            return text

    def wait(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + STARTS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.call("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(1)
            else:
                return
        raise RuntimeError(f"the server does not serve; it says:\n{Path(self._log.name).read_text()[-4000:]}")

    def stop(self) -> int:
        """Have it end as an operator would, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(90)
        finally:
            self.process.kill()
            self._log.close()


@pytest.fixture(params=["0", pytest.param("1", marks=pytest.mark.long)], ids=["V1", "V2"])
def server(model: Model, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    # Two ranks have a head each.
    from kv_canary.difftest.stress.vllm.engine import save_model

    folder = save_model(tmp_path / "two heads", num_key_value_heads=2)
    tokenizer().save_pretrained(folder)
    found = Server(folder, tmp_path / "log", VLLM_USE_V2_MODEL_RUNNER=request.param)
    try:
        found.wait()
        yield found
    finally:
        if found.process.poll() is None:
            found.process.kill()


def test_every_rank_of_a_server_is_guarded_by_the_environment_alone(server: Server, tmp_path: Path) -> None:
    shared = list(range(5, 90))
    texts = []
    for n in range(4):
        # One ends with a token; what is behind it has run ahead where scheduling is asynchronous.
        body = {"prompt": [*shared, 100 + n], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = json.loads(server.call("/v1/completions", {"model": str(tmp_path / "two heads"), **body}))
        assert answer["usage"]["completion_tokens"] == 12
        texts.append(answer["choices"][0]["text"])
    assert len(set(texts)) > 1
    statuses = json.loads(server.call("/collective_rpc", {"method": "kv_canary_status"}))["results"]
    statuses = [json.loads(s) if isinstance(s, str) else s for s in statuses]
    assert [s["rank"] for s in statuses] == [0, 1]
    assert len({s["process"] for s in statuses}) == 2
    for status in statuses:
        assert status["watching"] == "complete"
        assert status["violations"] == status["skipped"] == 0
        assert status["failures"] == {}
        # Three of four requests have hit two blocks each.
        assert status["positions_verified"] == status["positions_relied_on"] > 4000
    # A port for each rank.
    for rank, port in enumerate(server.metrics):
        metrics = server.call("/metrics", port=port)
        assert "kv_canary_violations_total" in metrics, rank
    log = tmp_path / "log"
    assert "Traceback" not in log.read_text()
    assert server.stop() == 0
    # vLLM's own front end may print an EngineDeadError where its engine core has obeyed the signal first.
    frames = [line for line in log.read_text().splitlines() if 'File "' in line]
    assert [line for line in frames if "kv_canary" in line or "kv-canary" in line] == []
    assert log.read_text().count("kv-canary: installed into vllm") == 2
