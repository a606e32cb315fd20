"""What is known of a video before its frames are decoded, what a request may ask of it, and how large it may be."""

from __future__ import annotations

from dataclasses import dataclass, fields

from deepstack_serving.errors import InvalidRequestError, SettingsError
from deepstack_serving.media.image_file import ImageLimits
from deepstack_serving.rules import integer, number

FPS = number(0, 1000, exclude_minimum=True)
FRAME_COUNT = integer(1, 1_000_000)


@dataclass(frozen=True)
class VideoSampling:
    """Which frames a request wants: so many a second, or so many in all. At most one is set; none: the checkpoint's."""

    frames_per_second: float | None = None
    frame_count: int | None = None


@dataclass(frozen=True)
class VideoLimits:
    """What one video may be at most. `max_pixels` counts all frames that are taken, `frame` bounds each of them."""

    max_bytes: int
    max_seconds: float
    max_frames: int
    max_pixels: int
    frame: ImageLimits

    def __post_init__(self) -> None:
        for name in (item.name for item in fields(self) if item.name != "frame"):
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name} of a video is {getattr(self, name)}; allowed is more than 0")


@dataclass(frozen=True)
class VideoHeader:
    """Frames, their rate and their size in pixels. `chosen`: somebody picked the frames already, so all are taken."""

    frames: int
    frames_per_second: float
    width: int
    height: int
    chosen: bool = False

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def seconds(self) -> float:
        return self.frames / self.frames_per_second

    def check(self, limits: VideoLimits) -> VideoHeader:
        """Itself. Raises InvalidRequestError with the value and the limit."""
        if self.frames < 1:
            raise InvalidRequestError("the video has no frames")
        if self.frames > limits.max_frames:
            raise InvalidRequestError(f"the video has {self.frames} frames, the limit is {limits.max_frames}")
        if self.seconds > limits.max_seconds:
            raise InvalidRequestError(f"the video takes {self.seconds:.1f} s, the limit is {limits.max_seconds:g}")
        pixels, size = self.width * self.height, f"the video has {self.size} pixels a frame"
        if pixels < 1:
            raise InvalidRequestError(f"{size}, which is no picture")
        if pixels > limits.frame.max_pixels:
            raise InvalidRequestError(f"{size} = {pixels}, the limit is {limits.frame.max_pixels}")
        return self

    def check_taken(self, count: int, limits: VideoLimits) -> None:
        """Whether so many frames may be held in memory. Raises InvalidRequestError with the value and the limit."""
        if count > limits.max_frames:
            raise InvalidRequestError(f"{count} frames are asked for, the limit is {limits.max_frames}")
        pixels = count * self.width * self.height
        if pixels > limits.max_pixels:
            raise InvalidRequestError(
                f"{count} frames of {self.size} pixels are {pixels}, the limit is {limits.max_pixels}: "
                "ask for fewer frames, or send a smaller video"
            )


@dataclass(frozen=True)
class MediaFiles:
    """The files of one request: images in the order of the prompt, videos in theirs, and which frames to take.

    `coming`: images of requests that are to follow soon; they are no part of this one.
    """

    images: tuple[bytes, ...] = ()
    videos: tuple[bytes, ...] = ()
    sampling: VideoSampling = VideoSampling()
    coming: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)
