"""The first station of a request: from validated inputs to a prompt of token ids, with every limit checked.

Nothing is decoded or encoded yet: sizes of images and videos come from the files' headers, so what cannot be served is
refused early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.engine.media_intake import MediaIntake
from deepstack_serving.engine.request import GenerationRequest
from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.families.base import VideoPlan
from deepstack_serving.media import MediaFiles
from deepstack_serving.prompt.messages import Conversation, parse_messages, text_bytes, user_turn
from deepstack_serving.prompt.placeholders import Prompt, expand_placeholders
from deepstack_serving.prompt.tokenizer import PromptTokenizer, VideoTexts
from deepstack_serving.settings import Settings


class Intake:
    """Builds prompts for one checkpoint."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint, tokenizer: PromptTokenizer) -> None:
        self._settings = settings
        self._media = MediaIntake(settings, checkpoint)
        self._image_token_id = checkpoint.family.image_token_id(checkpoint.config)
        self._video_token_id = checkpoint.family.video_token_id(checkpoint.config)
        self._may_touch = checkpoint.family.images_may_touch
        self._tokenizer = tokenizer
        self.max_context_length = context_limit(settings, checkpoint)

    def prepare(self, request: GenerationRequest) -> tuple[Prompt, GenerationRequest, MediaFiles]:
        """The prompt, the request with `max_tokens` settled, and its files. Raises InvalidRequestError."""
        conversation, images, videos = self._conversation(request)
        self._check_text(conversation)
        image_files, image_tokens = self._media.probe_images(images)
        video_files, plans = self._media.probe_videos(videos, request.video_sampling)
        prompt = expand_placeholders(
            self._encode(request, conversation, plans),
            self._image_token_id,
            image_tokens,
            self._may_touch,
            self._video_token_id,
            [plan.tokens for plan in plans],
        )
        files = MediaFiles(image_files, video_files, request.video_sampling)
        return prompt, self._settle_length(request, prompt), files

    @staticmethod
    def _conversation(request: GenerationRequest) -> tuple[Conversation, Sequence[bytes], Sequence[bytes]]:
        if request.messages is not None:
            return parse_messages(request.messages, request.images, request.videos)
        turn = user_turn(request.text or "", len(request.images), len(request.videos))
        return turn, request.images, request.videos

    def _check_text(self, conversation: Conversation) -> None:
        """Before it is tokenised, in the one thread that takes requests in."""
        size, limit = text_bytes(conversation), self._settings.max_text_bytes
        if size > limit:
            raise InvalidRequestError(
                f"the request has {size} bytes of text; at most {limit} are taken ('max_text_bytes'): shorten it"
            )

    def _encode(self, request: GenerationRequest, conversation: Conversation, plans: Sequence[VideoPlan]) -> list[int]:
        texts = tuple(plan.text for plan in plans)
        videos = VideoTexts(self._media.videos.placeholder, texts) if plans else None
        if request.raw_prompt:
            return self._tokenizer.encode_raw(request.text or "", videos)
        return self._tokenizer.encode_chat(conversation, videos)

    def _settle_length(self, request: GenerationRequest, prompt: Prompt) -> GenerationRequest:
        limit = self.max_context_length
        media = len(prompt.image_rows)
        room = limit - prompt.length
        wanted = request.sampling.max_tokens
        sizes = f"the prompt has {prompt.length} tokens ({prompt.length - media} of text, {media} of images)"
        if room < 1:
            raise InvalidRequestError(
                f"{sizes}; the context length is {limit}: shorten the text, or send fewer or smaller images or videos"
            )
        if wanted is not None and wanted > room:
            raise InvalidRequestError(f"{sizes}; with max_tokens {wanted} it exceeds the context length {limit}")
        settled = min(self._settings.default_max_tokens, room) if wanted is None else wanted
        return replace(request, sampling=replace(request.sampling, max_tokens=settled))


def context_limit(settings: Settings, checkpoint: Checkpoint) -> int:
    """The longest prompt and answer together, in tokens."""
    return min(settings.max_context_length or checkpoint.max_position_embeddings, checkpoint.max_position_embeddings)
