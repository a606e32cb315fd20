"""A request's images and videos at admission: told what they are by their headers, checked, and counted in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.families.base import VideoPlan, VideoProcessing
from deepstack_serving.media import VideoSampling, probe, probe_video, raw_bytes, raw_video, read_each
from deepstack_serving.settings import Settings
from deepstack_serving.stages.limits import image_limits, video_limits


class MediaIntake:
    """Nothing is decoded here: what cannot be served is refused before it costs anything."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint) -> None:
        self._settings, self._family, self._folder = settings, checkpoint.family, checkpoint.folder
        self._image_limits, self._video_limits = image_limits(settings), video_limits(settings)
        self._images = checkpoint.family.image_processing(checkpoint.folder)
        self._refusal = checkpoint.family.video_refusal(checkpoint.folder)

    @cached_property
    def videos(self) -> VideoProcessing:
        """The checkpoint's video processing; raises for one that takes no videos."""
        return self._family.video_processing(self._folder)

    def probe_images(self, payloads: Sequence[bytes]) -> tuple[tuple[bytes, ...], list[int]]:
        """The files, and the language tokens of each. Raises InvalidRequestError naming the image."""
        self._check_count("image", len(payloads), self._settings.max_images_per_request)
        results = read_each("image", payloads, self._image)
        return tuple(file for file, _ in results), [tokens for _, tokens in results]

    def probe_videos(
        self, payloads: Sequence[bytes], sampling: VideoSampling
    ) -> tuple[tuple[bytes, ...], list[VideoPlan]]:
        """The files, and what will be encoded of each. Raises InvalidRequestError naming the video."""
        if payloads and self._refusal is not None:
            raise InvalidRequestError(f"the request has a video, but {self._refusal}")
        self._check_count("video", len(payloads), self._settings.max_videos_per_request)
        results = read_each("video", payloads, lambda payload: self._video(payload, sampling))
        return tuple(file for file, _ in results), [plan for _, plan in results]

    def _image(self, payload: bytes) -> tuple[bytes, int]:
        file = raw_bytes(payload)
        header = probe(file, self._image_limits)
        return file, self._images.token_count(header.width, header.height)

    def _video(self, payload: bytes, sampling: VideoSampling) -> tuple[bytes, VideoPlan]:
        file = raw_video(payload)
        header = probe_video(file, self._video_limits)
        indices = self.videos.sample(header, sampling)
        header.check_taken(len(indices), self._video_limits)
        return file, self.videos.plan(header, indices)

    @staticmethod
    def _check_count(kind: str, count: int, limit: int) -> None:
        if count > limit:
            raise InvalidRequestError(
                f"the request has {count} {kind}s, all turns counted; the limit is {limit} ('max_{kind}s_per_request')"
            )
