"""The server under load, over gRPC from the same host: `python -m bench.gpu.server_arm PLAN`, PLAN as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from bench.gpu import memory, profile
from bench.gpu.arms import Phases
from bench.gpu.crowd import run_crowd
from bench.gpu.hardware import gpus, used_bytes
from bench.gpu.workload import IMAGE_TEXT_TOKENS, TEXT_TOKENS, Requests, check_lengths
from bench.processes import run_load
from bench.records import Case, summary
from bench.serving import embedded_server
from deepstack_serving.embedded import EmbeddedServer, ServerOptions
from deepstack_serving.repository import model_names, stage_names, write_repository
from deepstack_serving.settings import PREFIX, Settings, load_settings

_WARM_UP = 2
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class ServerPlan:
    """One server and how it is loaded. `settings` by their names; `starts` counts starts, the last is measured."""

    checkpoint: str
    stages: int
    pipelines: int
    settings: dict[str, str]
    image_side_px: int
    image_tokens: int | None
    output_tokens: int
    samples: int
    levels: tuple[int, ...]
    rounds: int
    starts: int
    whole_answers: bool
    profile: bool
    phase_limit_s: float
    start_limit_s: float
    server_folder: str | None
    server_arguments: tuple[str, ...]

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def environment(self) -> dict[str, str]:
        chosen = {"checkpoint": str(Path(self.checkpoint).absolute()), **self.settings}
        return {f"{PREFIX}{key.upper()}": value for key, value in chosen.items()}


class ServerArm:
    """Starts the server and runs one phase after another against it; enter it as a context."""

    def __init__(self, plan: ServerPlan, folder: Path) -> None:
        self._plan = plan
        self._phases = Phases(plan.phase_limit_s)
        self._repository = folder / "repository"
        self._requests = Requests(folder / "pictures", plan.image_side_px, plan.output_tokens)
        self._settings: Settings = load_settings({**os.environ, **plan.environment()})
        self._models = model_names(stage_names(plan.stages), plan.pipelines)
        self._idle_bytes = used_bytes()
        write_repository(self._repository, stage_names(plan.stages), plan.pipelines)
        (folder / "pictures").mkdir()

    def run(self) -> None:
        """All phases; without a started server there are none."""
        with contextlib.ExitStack() as stack:
            server = self._start(stack)
            if server is None or self._learn(server) is None:
                return
            self._phases.run("memory at start", lambda: self._memory(server))
            self._one_client(server)
            for level in self._plan.levels:
                self._many(server, level, stream=True)
            if self._plan.levels and self._plan.whole_answers:
                self._many(server, max(self._plan.levels), stream=False)
            if self._plan.profile:
                self._profiles(server)
            self._phases.run("memory under load", lambda: self._memory(server))

    def _learn(self, server: EmbeddedServer) -> Any:
        def count(case: Case) -> int:
            (record,), _ = run_load(server.grpc_address, 1, [case])
            return record.input_tokens

        return self._phases.run("overheads", lambda: self._requests.learn(count))

    def _start(self, stack: contextlib.ExitStack) -> EmbeddedServer | None:
        """The last of the starts stays up; each says whether compiled code was there before it."""
        server: EmbeddedServer | None = None
        for number in range(1, self._plan.starts + 1):
            stack.close()

            def start() -> dict[str, Any]:
                nonlocal server
                cached, started_s = self._has_compiled_code(), time.perf_counter()
                server = stack.enter_context(self._server())
                return {"seconds": time.perf_counter() - started_s, "compiled_code_was_there": cached}

            if self._phases.run(f"start {number}", start, self._plan.start_limit_s) is None:
                return None
        return server

    def _server(self) -> contextlib.AbstractContextManager[EmbeddedServer]:
        folder = Path(self._plan.server_folder) if self._plan.server_folder else None
        options = ServerOptions(server_folder=folder, extra_arguments=self._plan.server_arguments)
        checkpoint = Path(self._plan.checkpoint)
        return embedded_server(checkpoint, self._plan.environment(), self._repository, options)

    def _has_compiled_code(self) -> bool:
        folder = self._settings.compile_cache_folder
        return folder.is_dir() and any(folder.iterdir())

    def _one_client(self, server: EmbeddedServer) -> None:
        image_length = self._image_length()

        def measure(cases: Sequence[Case], length: int | None) -> dict[str, Any]:
            records, _ = run_load(server.grpc_address, 1, cases)
            if length is not None:
                check_lengths(records, length)
            return {**summary(records[_WARM_UP:]), "input_tokens": records[-1].input_tokens}

        count = _WARM_UP + self._plan.samples
        self._phases.run("image, 1 client", lambda: measure(self._images(count), image_length))
        self._phases.run("text, 1 client", lambda: measure(self._requests.text(count), TEXT_TOKENS))

    def _many(self, server: EmbeddedServer, clients: int, stream: bool) -> None:
        """So many clients, each with several requests, once with pictures and once without."""
        kinds: dict[str, Callable[[int], list[Case]]] = {"image": self._images, "text": self._requests.text}
        for kind, make in kinds.items():

            def measure(make: Callable[[int], list[Case]] = make) -> dict[str, Any]:
                cases = make(clients * self._plan.rounds)
                warm_up = [replace(case, max_tokens=_WARM_UP_TOKENS) for case in cases[:clients]]
                run_crowd(server.grpc_address, clients, warm_up, stream)
                return run_crowd(server.grpc_address, clients, cases, stream)

            self._phases.run(f"{kind}, {clients} at once{'' if stream else ', whole answers'}", measure)

    def _profiles(self, server: EmbeddedServer) -> None:
        """The longer of two answers less the shorter is nothing but decode steps."""
        tokens, address = self._plan.output_tokens, server.grpc_address

        def decode() -> dict[str, Any]:
            cases, before = self._requests.text(1), self._counts(server)
            run_load(address, 1, [replace(case, max_tokens=1) for case in cases])
            between = self._counts(server)
            (record,), _ = run_load(address, 1, cases)
            after = self._counts(server)
            steps = {name: after[name].since(between[name]).since(between[name].since(before[name])) for name in after}
            nothing = {name: counts.since(counts) for name, counts in steps.items()}
            return profile.profile(nothing, steps, tokens - 1, record.per_token_s)

        def first() -> dict[str, Any]:
            cases = [replace(case, max_tokens=1) for case in self._images(self._plan.samples)]
            before = self._counts(server)
            records, _ = run_load(address, 1, cases)
            return profile.profile(before, self._counts(server), len(cases), sum(r.end_s for r in records) / len(cases))

        def crowd() -> dict[str, Any]:
            cases, before = self._images(max(self._plan.levels) * self._plan.rounds), self._counts(server)
            result = run_crowd(address, max(self._plan.levels), cases, stream=True)
            return profile.profile(before, self._counts(server), len(cases) * tokens, 1 / result["tokens_per_s"])

        self._phases.run("profile of a decode step, text, 1 client", decode)
        self._phases.run("profile of a first token, image, 1 client", first)
        if self._plan.levels:
            self._phases.run(f"profile of a token, image, {max(self._plan.levels)} at once", crowd)

    def _counts(self, server: EmbeddedServer) -> dict[str, Any]:
        return profile.read_counts(server.http_address, self._models)

    def _memory(self, server: EmbeddedServer) -> dict[str, Any]:
        tokens = memory.kv_blocks(server.metrics_address) * self._settings.block_size
        planned = memory.planned_bytes(self._settings, self._plan.stages, self._plan.pipelines, tokens)
        if not gpus():
            return {**planned, "kv_tokens": tokens}
        used = used_bytes() - self._idle_bytes
        return {**planned, "kv_tokens": tokens, "used": used, "beyond": used - planned["weights"] - planned["kv_pool"]}

    def _images(self, count: int) -> list[Case]:
        return self._requests.image(count, self._plan.image_tokens)

    def _image_length(self) -> int | None:
        return None if self._plan.image_tokens is None else self._plan.image_tokens + IMAGE_TEXT_TOKENS


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(1)


def main() -> None:
    """A SIGTERM ends the server in order: whoever comes next finds the GPU free."""
    signal.signal(signal.SIGTERM, _end)
    values: dict[str, Any] = json.loads(sys.argv[1])
    values |= {key: tuple(values[key]) for key in ("levels", "server_arguments")}
    plan = ServerPlan(**values)
    with tempfile.TemporaryDirectory(prefix="deepstack-bench-") as folder:
        ServerArm(plan, Path(folder)).run()


if __name__ == "__main__":
    main()
