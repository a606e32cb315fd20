"""What one image or video may be at most, by the settings; the orchestrator and the vision encoder hold to the same."""

from __future__ import annotations

from deepstack_serving.media import ImageLimits, VideoLimits
from deepstack_serving.settings import Settings


def image_limits(settings: Settings) -> ImageLimits:
    return ImageLimits(max_pixels=settings.max_image_pixels, max_bytes=settings.max_image_bytes)


def video_limits(settings: Settings) -> VideoLimits:
    return VideoLimits(
        max_bytes=settings.max_video_bytes,
        max_seconds=settings.max_video_seconds,
        max_frames=settings.max_video_frames,
        max_pixels=settings.max_video_pixels,
        frame=image_limits(settings),
    )
