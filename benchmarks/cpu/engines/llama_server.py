"""llama.cpp's server on this machine, called over HTTP with token ids, a connection for each request, with streaming.

It is restarted for each workload with a slot for each request, since its context is divided between slots.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request

from benchmarks.cpu.engines.protocol import Answer, Engine, Settings
from benchmarks.cpu.workloads import Request

_BATCH = 512
_START_S = 120


def load(settings: Settings) -> Engine:
    return _Server(settings)


class _Server:
    def __init__(self, settings: Settings):
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        done = subprocess.run([settings.server, "--version"], capture_output=True, text=True, check=False)
        version = next((line for line in (done.stdout + done.stderr).splitlines() if "version" in line), "")
        self._cache = "f32" if settings.weight_format == "fp32" else "f16"
        options = {"batch": _BATCH, "cache": self._cache, "flash_attention": "on", "prompt_cache": "off"}
        self.about = {"versions": {"llama.cpp": version.removeprefix("version: ")}, "options": options}

    def prepare(self, requests: list[Request]) -> None:
        self.close()
        context = -(-(max(len(each.prompt) + each.num_new for each in requests) + 16) // 256) * 256
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        threads = str(self._settings.num_threads)
        command = [self._settings.server, "-m", str(self._settings.model), "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "-t", threads, "-tb", threads, "-b", str(_BATCH), "-ub", str(_BATCH)]
        command += ["-np", str(len(requests)), "-c", str(len(requests) * context), "-no-kvu"]
        command += ["-ctk", self._cache, "-ctv", self._cache, "-fa", "on", "--no-cache-prompt", "-cram", "0"]
        command += ["--threads-http", str(len(requests) + 2)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + _START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            time.sleep(0.1)

    def run(self, requests: list[Request]) -> list[Answer]:
        async def run_all() -> list[Answer]:
            return await asyncio.gather(*(self._run_one(each) for each in requests))

        return asyncio.run(run_all())

    def process_ids(self) -> list[int]:
        return [self._process.pid] if self._process else []

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    async def _run_one(self, request: Request) -> Answer:
        body = {"prompt": request.prompt, "n_predict": request.num_new, "ignore_eos": True, "temperature": 0}
        body |= {"top_k": 1, "samplers": ["top_k"], "cache_prompt": False, "stream": True, "return_tokens": True}
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        head = "POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        answer = Answer()
        async for line in reader:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                tokens = event.get("tokens") or []
                answer.tokens += tokens
                answer.times += [time.perf_counter()] * len(tokens)
                if event.get("stop"):
                    break
        writer.close()
        return answer
