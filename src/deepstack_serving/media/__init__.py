"""Image and video files on their way in: from the bytes of a request to checked RGB pixels.

The orchestrator calls `raw_bytes` and `probe` at admission, `raw_video` and `probe_video` for a video; the vision
encoder's `Decoding` and `decode_video` before it runs its tower. Pillow, numpy and PyAV only: whoever imports this
gets no torch.
"""

from deepstack_serving.media.clip import FPS, FRAME_COUNT, MediaFiles, VideoHeader, VideoLimits, VideoSampling
from deepstack_serving.media.decoding import Decoding
from deepstack_serving.media.frame_list import frame_list
from deepstack_serving.media.image_file import ImageHeader, ImageLimits, decode, in_batches, probe
from deepstack_serving.media.payload import raw_bytes, raw_video, read_each
from deepstack_serving.media.video import decode_video, probe_video

__all__ = [
    "FPS",
    "FRAME_COUNT",
    "Decoding",
    "ImageHeader",
    "ImageLimits",
    "MediaFiles",
    "VideoHeader",
    "VideoLimits",
    "VideoSampling",
    "decode",
    "decode_video",
    "frame_list",
    "in_batches",
    "probe",
    "probe_video",
    "raw_bytes",
    "raw_video",
    "read_each",
]
