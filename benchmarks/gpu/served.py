"""Measures the same engine behind HTTP: the steady state of `splitfuse` over sockets.

A server loads its model from files, so the model is written to a directory first. Then `fastgen serve` runs in a
process of its own, and this one keeps as many streams open as `splitfuse` keeps requests in flight. Times are the
client's.
"""

from __future__ import annotations

import itertools
import json
import random
import selectors
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from benchmarks.cpu.models import Shape, config
from benchmarks.gpu.gates import GateError
from benchmarks.gpu.llama import LLAMA_2_7B, TOY, LlamaShape, RandomWeights, llama_spec
from benchmarks.gpu.measuring import Bench, Row, Rows
from benchmarks.gpu.splitfuse import IN_FLIGHT, TOKEN_BUDGET, percentiles
from benchmarks.gpu.workload import lengths
from benchmarks.serving import Answer, request_body, served
from fastgen.errors import FastgenError
from fastgen.models.checkpoint.tensor_files import Read
from fastgen.serving.extra import need_extra

_SECONDS, _ROW_SECONDS = 30.0, 10.0
# Tensors in a file of weights: four layers.
_A_FILE = 36


def measure(bench: Bench) -> Rows:
    try:
        need_extra()  # before gigabytes are written
    except FastgenError as error:
        raise ImportError(str(error)) from error
    shape, in_flight, budget = (TOY, 2, 4) if bench.toy else (LLAMA_2_7B, IN_FLIGHT, TOKEN_BUDGET)
    flags = ["--target", "triton", "--token-budget", str(budget), "--max-num-seqs", str(in_flight)]
    with tempfile.TemporaryDirectory(prefix="fastgen-http-") as directory:
        write_model(shape, Path(directory), bench.where)
        if not bench.toy:
            torch.cuda.empty_cache()  # the server takes all free memory
        start = time.perf_counter()
        with served(directory, (*flags, "--no-prefix-caching"), says=True) as port:
            yield {"case": "start", "seconds": time.perf_counter() - start}
            with Connections(port, directory, shape, in_flight, toy=bench.toy) as loop:
                loop.run(0.0, in_flight)
                loop.forget()
                for _ in range(1 if bench.toy else round(_SECONDS / _ROW_SECONDS)):
                    loop.run(0.0 if bench.toy else _ROW_SECONDS, len(loop.ttft_seconds) + 2)
                    yield {"case": f"{in_flight} in flight, {loop.seconds:.0f} s", **loop.found()}


class Connections:
    """Keeps ``in_flight`` streams open to the server at ``port``, and counts those that ended since :meth:`forget`."""

    def __init__(self, port: int, model: str, shape: LlamaShape, in_flight: int, *, toy: bool):
        self._port, self._model, self._vocab, self._in_flight = port, model, shape.vocab, in_flight
        self._lengths, self._draw = lengths(shape, toy=toy), random.Random(0)
        self._selector = selectors.DefaultSelector()
        self.forget()

    def __enter__(self) -> Connections:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the connections, which cancels the requests that still run."""
        for key in list(self._selector.get_map().values()):
            key.data[0].socket.close()
        self._selector.close()

    def forget(self) -> None:
        self._begin = time.perf_counter()
        self.ttft_seconds: list[float] = []
        self._num_tokens = 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    def run(self, seconds: float, least: int) -> None:
        """Runs for at least these seconds and until at least this many requests have been answered."""
        end = self.seconds + seconds
        while self.seconds < end or len(self.ttft_seconds) < least:
            while len(self._selector.get_map()) < self._in_flight:
                self._ask()
            for key, _ in self._selector.select():
                answer, asked_s, num_tokens = key.data
                if answer.take():
                    self._selector.unregister(answer.socket)
                    answer.socket.close()
                    if (ended := _ended(answer.body)) != "length":
                        raise GateError(f"an answer ended by {ended}")
                    self.ttft_seconds.append(answer.first_s - asked_s)
                    self._num_tokens += num_tokens

    def _ask(self) -> None:
        length, num_new = next(self._lengths)
        prompt = [self._draw.randrange(self._vocab) for _ in range(length)]
        body = request_body(self._model, prompt, num_new, is_stream=True)
        asked_s = time.perf_counter()
        answer = Answer(self._port, body)
        self._selector.register(answer.socket, selectors.EVENT_READ, (answer, asked_s, length + num_new))

    def found(self) -> Row:
        seconds, requests = self.seconds, len(self.ttft_seconds)
        return {
            "seconds": seconds,
            "requests_per_s": requests / seconds,
            "requests": requests,
            "tokens_per_s": self._num_tokens / seconds,
            "ttft_seconds": percentiles(self.ttft_seconds),
        }


def _ended(body: bytes) -> str | None:
    """Returns the finish reason of the answer that was streamed in ``body``."""
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    reasons = [choice.get("finish_reason") for event in events for choice in event.get("choices", ())]
    return next((reason for reason in reversed(reasons) if reason), None)


def write_model(shape: LlamaShape, directory: Path, device: torch.device) -> None:
    """Writes a checkpoint with random weights, drawn on ``device``, and a tokenizer that has a word for each id."""
    sizes = Shape(shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.ffn, shape.dtype)
    own = {"vocab_size": shape.vocab, "max_position_embeddings": shape.max_positions, "rms_norm_eps": shape.eps}
    (directory / "config.json").write_text(json.dumps(config(sizes) | own), encoding="utf-8")
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(shape.vocab)}, unk_token="w0"))
    words.save(str(directory / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")
    spec = llama_spec(shape)
    weights = RandomWeights.of(spec, shape.dtype, device)
    reads = [Read(name, header) for name, header in weights.tensors.items()]
    places: dict[str, str] = {}
    for number in itertools.count():
        some = reads[number * _A_FILE : (number + 1) * _A_FILE]
        if not some:
            break
        file = f"model-{number}.safetensors"
        save_file({read.name: tensor.cpu() for read, tensor in weights.stream(some)}, directory / file)
        places |= {read.name: file for read in some}
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
