"""One answer on its way to the client: from tokens, some at a time, to responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepstack_serving.engine.events import Alternatives, Tokens
from deepstack_serving.engine.ports import Output
from deepstack_serving.engine.sequence import Sequence as Running
from deepstack_serving.engine.text_stream import TextStream

_NO_ALTERNATIVES: Alternatives = ((), ())


class Answer:
    """Owned by the output thread. `text_of` is the text of a single token."""

    def __init__(self, sequence: Running, tokenizer: Any, text_of: Callable[[int], str], now_s: float) -> None:
        self.sequence = sequence
        self.polled_s = now_s
        self.sent_s = 0.0
        self.finish_reason: str | None = None
        self.ends_early = False  # a stop string ended it, of which the engine does not know
        self._text, self._text_of = TextStream(tokenizer, sequence.request.sampling.stop), text_of
        self._waiting: list[Tokens] = []
        self._pending = ""
        self._tokens = 0
        self._cumulative_logprob = 0.0
        self._logprobs: list[dict[str, Any]] = []

    def add(self, tokens: Tokens) -> None:
        """Tokens that `settle` works off."""
        self._waiting.append(tokens)

    def may_wait(self, until_s: float) -> bool:
        """Whether `settle` may be put off: the client has had a response since `until_s`, and this is not the last."""
        return self.sent_s > until_s and self._waiting[-1].finish_reason is None

    def settle(self) -> Output | None:
        """The response that the tokens since the last call come to, if any; sets `finish_reason` with the last."""
        last = self._waiting[-1]
        ids = [token_id for tokens in self._waiting for token_id in tokens.ids]
        self._count(self._push(ids[:-1] if last.ends_with_eos else ids, len(ids)))
        self._waiting.clear()
        self.finish_reason = "stop" if self._text.stopped else last.finish_reason
        if self.finish_reason is not None and not self._text.stopped:
            self._pending += self._text.flush()
            self.finish_reason = "stop" if self._text.stopped else last.finish_reason
        self.ends_early = self.finish_reason is not None and last.finish_reason is None
        if self.finish_reason is None and not (self._pending and self.sequence.request.output.stream):
            return None
        return self._output()

    def _push(self, ids: list[int], count: int) -> int:
        """Make text of ids; how many of `count` tokens belong to the answer, which a stop string may end before."""
        request = self.sequence.request
        if request.sampling.stop:
            for place, token_id in enumerate(ids, 1):
                self._pending += self._text.push(token_id)
                if self._text.stopped:
                    return place
        elif request.output.stream:
            self._pending += self._text.push_all(ids)
        else:
            self._text.keep(ids)
        return count

    def _count(self, used: int) -> None:
        describes = self.sequence.request.output.logprobs
        self._tokens += used
        for tokens in self._waiting:
            for place in range(min(used, len(tokens.ids))):
                self._cumulative_logprob += tokens.logprobs[place]
                if describes:
                    self._logprobs.append(self._describe(tokens, place))
            used -= min(used, len(tokens.ids))

    def _describe(self, tokens: Tokens, place: int) -> dict[str, Any]:
        top_ids, top_logprobs = tokens.top[place] if tokens.top else _NO_ALTERNATIVES
        return {
            **self._entry(tokens.ids[place], tokens.logprobs[place]),
            "top_logprobs": [self._entry(*pair) for pair in zip(top_ids, top_logprobs, strict=True)],
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token_id, "token": self._text_of(token_id), "logprob": logprob}

    def _output(self) -> Output:
        request = self.sequence.request
        prefix = request.text or "" if request.output.echo_input else ""
        output = Output(
            text=prefix + self._pending,
            finish_reason=self.finish_reason,
            input_tokens=self.sequence.prompt.length,
            output_tokens=self._tokens,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=tuple(self._logprobs),
            options=request.output,
        )
        self._pending, self._tokens, self._logprobs = "", 0, []
        return output
