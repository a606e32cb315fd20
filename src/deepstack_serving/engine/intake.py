"""The first station of a request: from validated inputs to a prompt of token ids, with every limit checked.

Nothing is decoded or encoded yet: image sizes come from the files' headers, so what cannot be served is refused early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.engine.request import GenerationRequest
from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.media import ImageLimits, probe, raw_bytes
from deepstack_serving.prompt.messages import parse_messages, user_turn
from deepstack_serving.prompt.placeholders import Prompt, expand_placeholders
from deepstack_serving.prompt.tokenizer import PromptTokenizer
from deepstack_serving.settings import Settings


class Intake:
    """Builds prompts for one checkpoint."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint, tokenizer: PromptTokenizer) -> None:
        self._settings = settings
        self._limits = ImageLimits(max_pixels=settings.max_image_pixels, max_bytes=settings.max_image_bytes)
        self._processing = checkpoint.family.image_processing(checkpoint.folder)
        self._image_token_id = checkpoint.family.image_token_id(checkpoint.config)
        self._may_touch = checkpoint.family.images_may_touch
        self._tokenizer = tokenizer
        self.max_context_length = context_limit(settings, checkpoint)

    def prepare(self, request: GenerationRequest) -> tuple[Prompt, GenerationRequest, tuple[bytes, ...]]:
        """The prompt, the request with `max_tokens` settled, and the image files. Raises InvalidRequestError."""
        token_ids, payloads = self._encode(request)
        self._check_image_count(len(payloads))
        files, counts = self._probe(payloads)
        prompt = expand_placeholders(token_ids, self._image_token_id, counts, self._may_touch)
        return prompt, self._settle_length(request, prompt), tuple(files)

    def _encode(self, request: GenerationRequest) -> tuple[list[int], Sequence[bytes]]:
        if request.messages is not None:
            conversation, images = parse_messages(request.messages, request.images)
            return self._tokenizer.encode_chat(conversation), images
        text = request.text or ""
        if request.raw_prompt:
            return self._tokenizer.encode_raw(text), request.images
        return self._tokenizer.encode_chat(user_turn(text, len(request.images))), request.images

    def _check_image_count(self, count: int) -> None:
        limit = self._settings.max_images_per_request
        if count > limit:
            raise InvalidRequestError(
                f"the request has {count} images, all turns counted; the limit is {limit} ('max_images_per_request')"
            )

    def _probe(self, payloads: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        files, counts = [], []
        for index, payload in enumerate(payloads):
            try:
                file = raw_bytes(payload)
                header = probe(file, self._limits)
                counts.append(self._processing.token_count(header.width, header.height))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"image[{index}]: {error}") from error
            files.append(file)
        return files, counts

    def _settle_length(self, request: GenerationRequest, prompt: Prompt) -> GenerationRequest:
        limit, images = self.max_context_length, sum(prompt.image_tokens)
        room = limit - prompt.length
        wanted = request.sampling.max_tokens
        sizes = f"the prompt has {prompt.length} tokens ({prompt.length - images} of text, {images} of images)"
        if room < 1:
            raise InvalidRequestError(
                f"{sizes}; the context length is {limit}: shorten the text, or send fewer or smaller images"
            )
        if wanted is not None and wanted > room:
            raise InvalidRequestError(f"{sizes}; with max_tokens {wanted} it exceeds the context length {limit}")
        settled = min(self._settings.default_max_tokens, room) if wanted is None else wanted
        return replace(request, sampling=replace(request.sampling, max_tokens=settled))


def context_limit(settings: Settings, checkpoint: Checkpoint) -> int:
    """The longest prompt and answer together, in tokens."""
    return min(settings.max_context_length or checkpoint.max_position_embeddings, checkpoint.max_position_embeddings)
