"""Puts the orchestrator's parts together, and is its door: `submit` takes a request, the reply gets the answer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from deepstack_serving.checkpoint import Checkpoint, open_checkpoint
from deepstack_serving.engine.audit_parameters import AuditParameters
from deepstack_serving.engine.connection import Connection
from deepstack_serving.engine.encoder import Encoder
from deepstack_serving.engine.engine import Engine
from deepstack_serving.engine.inbox import Inbox
from deepstack_serving.engine.intake import Intake
from deepstack_serving.engine.outputs import OutputWorker
from deepstack_serving.engine.pipeline import StagePipeline
from deepstack_serving.engine.ports import Output, ReplyPort, StagePort
from deepstack_serving.engine.request import parse_request
from deepstack_serving.engine.sampling_parameters import SamplingParameters
from deepstack_serving.engine.sequence import Sequence as Running
from deepstack_serving.errors import CancelledError, CheckpointError, DeepstackError
from deepstack_serving.injection import plan_stages
from deepstack_serving.prompt.tokenizer import PromptTokenizer
from deepstack_serving.settings import Settings

CLOSE_TIMEOUT_S = 20.0


class Orchestrator:
    """Validates and enqueues in the caller's thread; the engine and the output worker have a thread each."""

    def __init__(self, settings: Settings, port: StagePort, stage_names: Sequence[str]) -> None:
        checkpoint = open_checkpoint(settings.checkpoint, settings.dtype, merge_adapter=settings.merge_adapter)
        plans = plan_stages(
            checkpoint.layer_count, len(stage_names), settings.split_points, checkpoint.deepstack_layers
        )
        defaults = GenerationDefaults(checkpoint)
        tokenizer = PromptTokenizer(checkpoint.folder, checkpoint.family.placeholder_ids(checkpoint.config))
        sequences = settings.max_running_requests
        rows = max(settings.prefill_token_budget, sequences)
        pipeline = StagePipeline(port, checkpoint.contract, stage_names, plans, rows, sequences)
        connection = Connection(port, pipeline, checkpoint.fingerprint)
        inbox = Inbox()
        # A tokenizer of its own: encoding switches flags that must not change under the decoding thread.
        decoder = Tokenizer.from_str(tokenizer.tokenizer.backend_tokenizer.to_str())
        self._settings = settings
        self._intake = Intake(settings, checkpoint, tokenizer)
        self._defaults = defaults.sampling
        self._audit = AuditParameters(settings, checkpoint.deepstack_layers, connection)
        self.engine = Engine(
            settings,
            connection,
            pipeline,
            Encoder(port, checkpoint, settings.encoder_threads),
            OutputWorker(decoder, inbox.put_ended),
            inbox,
            defaults.eos_token_ids,
        )
        self._threads = [
            threading.Thread(target=self.engine.run, name="engine", daemon=True),
            threading.Thread(target=self.engine.outputs.run, name="outputs", daemon=True),
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, inputs: Mapping[str, list[Any]], parameters: Mapping[str, Any], reply: ReplyPort) -> None:
        """Validate and enqueue one request; what is wrong with it goes to its reply, as the only response."""
        deadline_s = time.monotonic() + self._settings.request_timeout_s
        try:
            if reply.is_cancelled():  # a client that left while others were taken in costs nothing more
                raise CancelledError("the request was cancelled by its client")
            audit, others = self._audit.take(self._without_headers(parameters))
            request = replace(parse_request(inputs, others, self._defaults), audit=audit)
            if audit.describe:
                text = self._audit.describe().to_json()
                reply.send(Output(text, "stop", 0, 0, 0.0, options=request.output), final=True)
                return
            prompt, request, files = self._intake.prepare(request)
        except DeepstackError as error:
            reply.fail(error)
            return
        self.engine.submit(Running(request, prompt, files, reply, deadline_s))

    def _without_headers(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Triton adds the headers that it forwards to the parameters that a client sent."""
        headers = self._settings.forwarded_headers
        return {name: value for name, value in parameters.items() if name.lower() not in headers}

    def close(self) -> None:
        """End both threads; requests that are still open fail."""
        self.engine.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(CLOSE_TIMEOUT_S)

    @property
    def is_healthy(self) -> bool:
        """Both threads live, the engine goes round, the stages answer."""
        return all(thread.is_alive() for thread in self._threads) and self.engine.is_healthy


class GenerationDefaults:
    """What the checkpoint's generation_config.json says: end-of-sequence ids and default sampling."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        path = checkpoint.folder / "generation_config.json"
        try:
            values = json.loads(path.read_text()) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        eos = values.get("eos_token_id", getattr(checkpoint.config.text_config, "eos_token_id", None))
        self.eos_token_ids: tuple[int, ...] = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        self.sampling = SamplingParameters()
        if values.get("do_sample"):
            self.sampling = SamplingParameters(
                temperature=float(values.get("temperature", 1.0)),
                top_k=int(values.get("top_k", 0) or 0),
                top_p=float(values.get("top_p", 1.0)),
                min_p=float(values.get("min_p", 0.0) or 0.0),
            )
