"""The embedded server as its users see it: start, wait until ready, drain, stop."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from deepstack_serving.embedded.failures import EmbeddedServerError, ServerStartError
from deepstack_serving.embedded.launching import LOG_NAME, POLL_S, RunningServer, ended_error, launch, wait_until
from deepstack_serving.embedded.loading import Progress, ProgressListener, load_models
from deepstack_serving.embedded.options import ServerOptions
from deepstack_serving.errors import UnavailableError


class EmbeddedServer:
    """A tritonserver of this machine that serves named models of one repository.

    `start` (or entering the context) returns when the endpoints answer; `wait_until_ready` loads the models. The server
    lives in a guardian process and ends with this process, however this one ends. Its working folder is the run
    directory, so paths in `environment` are to be absolute. Not safe for use by several threads at once.
    """

    def __init__(
        self,
        model_repository: Path,
        models: Sequence[str],
        environment: Mapping[str, str] | None = None,
        options: ServerOptions | None = None,
    ) -> None:
        self._model_repository = model_repository.absolute()
        self._models = tuple(models)
        self._environment = dict(environment or {})
        self._options = options or ServerOptions()
        self._run_directory: Path | None = None
        self._running: RunningServer | None = None
        self._keep_log = False
        self._has_models = False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Start the process and wait until its endpoints answer; no model is loaded yet."""
        self._check_models_exist()
        self._run_directory = _make_run_directory(self._options.run_directory)
        try:
            self._running = launch(self._options, self._model_repository, self._environment, self._run_directory)
        except EmbeddedServerError:
            self._keep_log = self.log_path.exists()
            self._remove_run_directory()
            raise
        return self

    def wait_until_ready(
        self,
        timeout_s: float = 600.0,
        probe: Callable[[], object] | None = None,
        listener: ProgressListener | None = None,
    ) -> None:
        """Load the models, then call `probe` until it raises no UnavailableError.

        A probe is a small real request: Triton calls a model ready whose process has died.
        """
        started_s = time.monotonic()
        report = listener or _ignore_progress
        running = self._checked()
        try:
            load_models(running.control, self._models, timeout_s, report)
            self._has_models = True
            self._wait_for_probe(probe, started_s, timeout_s, report)
        except UnavailableError as error:
            self._keep_log = True
            if running.process.exit_status() is None:
                raise
            raise ended_error(running.process) from error

    def load(self, model: str, timeout_s: float = 600.0) -> None:
        """Load one model; a model whose process has died comes back by `unload` and `load`."""
        self._checked().control.load(model, timeout_s)
        self._has_models = True

    def unload(self, model: str, timeout_s: float = 60.0) -> None:
        """Unload one model; returns when its processes have ended."""
        running = self._checked()
        running.control.unload(model)
        if not wait_until(lambda: not running.process.stub_process_ids(model), timeout_s):
            raise UnavailableError(f"model {model!r} still has requests after {timeout_s:g} s")

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Refuse new requests and wait for the running ones; False if some still run after the timeout."""
        running = self._checked()
        if self._options.entry_model in self._models:
            running.control.unload(self._options.entry_model)
        return wait_until(lambda: not running.control.gauge(self._options.active_gauge), timeout_s)

    def stop(self, drain_timeout_s: float = 30.0) -> None:
        """Drain, end the server and remove what it leaves; does nothing if it is not running."""
        if self._running is not None:
            process = self._running.process
            self._keep_log |= process.exit_status() is not None
            try:
                if self._has_models and process.exit_status() is None and self.drain(drain_timeout_s):
                    self._unload_in_order()
            except UnavailableError:
                self._keep_log = True
            finally:
                # Without a model there is nothing to lose, while a load under way would hold up an orderly end.
                (process.stop if self._has_models else process.kill)()
                self._running = None
        self._remove_run_directory()

    def wait(self) -> int:
        """Block until the server ends by itself; returns its exit status."""
        return self._checked().process.wait()

    def ask(self, text: str, max_tokens: int = 1, timeout_s: float = 120.0) -> str:
        """One small request to the entry model, as a probe: raises UnavailableError while it is not ready."""
        inputs = {"text_input": text, "sampling_parameters": json.dumps({"max_tokens": max_tokens})}
        answer = self._checked().control.generate(self._options.entry_model, inputs, timeout_s)
        return str(answer.get("text_output", ""))

    def ended_error(self) -> ServerStartError:
        """Why the server ended, with the last lines of its log."""
        self._keep_log = True
        return ended_error(self._checked().process)

    def stub_process_ids(self, model: str) -> list[int]:
        """The processes that run one model's Python code."""
        return self._checked().process.stub_process_ids(model)

    def is_running(self) -> bool:
        return self._running is not None and self._running.process.exit_status() is None

    @property
    def process_id(self) -> int:
        return self._checked().process.process_id

    @property
    def http_address(self) -> str:
        return self._checked().http_address

    @property
    def grpc_address(self) -> str:
        return self._checked().grpc_address

    @property
    def metrics_address(self) -> str:
        return self._checked().metrics_address

    @property
    def log_path(self) -> Path:
        if self._run_directory is None:
            raise EmbeddedServerError("the embedded server has not been started")
        return self._run_directory / LOG_NAME

    def _checked(self) -> RunningServer:
        if self._running is None:
            raise EmbeddedServerError("the embedded server is not running")
        return self._running

    def _check_models_exist(self) -> None:
        missing = [name for name in self._models if not (self._model_repository / name).is_dir()]
        if missing:
            raise ServerStartError(
                f"no folder for {', '.join(missing)} in the model repository {self._model_repository}"
            )

    def _unload_in_order(self) -> None:
        """The entry model goes first, so that it finishes while the models that it calls are still there."""
        if self._options.entry_model in self._models:
            self.unload(self._options.entry_model, self._options.exit_timeout_s)
        for model in self._models:
            self._checked().control.unload(model)
        wait_until(lambda: not any(map(self.stub_process_ids, self._models)), self._options.exit_timeout_s)

    def _wait_for_probe(
        self, probe: Callable[[], object] | None, started_s: float, timeout_s: float, report: ProgressListener
    ) -> None:
        while probe is not None:
            try:
                probe()
                return
            except UnavailableError:
                elapsed_s = time.monotonic() - started_s
                if elapsed_s > timeout_s or not self.is_running():
                    raise
                report(Progress(elapsed_s, ()))
                time.sleep(POLL_S)

    def _remove_run_directory(self) -> None:
        """A folder of our own goes, unless its log tells of a failure."""
        if self._run_directory is not None and self._options.run_directory is None and not self._keep_log:
            shutil.rmtree(self._run_directory, ignore_errors=True)


def _make_run_directory(wanted: Path | None) -> Path:
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="deepstack-"))
    wanted.mkdir(parents=True, exist_ok=True)
    return wanted.absolute()


def _ignore_progress(_: Progress) -> None:
    """The listener of a caller who wants none."""
