"""Image files on their way in: from the bytes of a request to checked RGB pixels.

The orchestrator calls `raw_bytes` and `probe` at admission, the vision encoder `decode_all` before it runs its tower.
Pillow and numpy only: whoever imports this gets no torch.
"""

from deepstack_serving.media.image_file import ImageHeader, ImageLimits, decode, decode_all, probe
from deepstack_serving.media.payload import raw_bytes

__all__ = ["ImageHeader", "ImageLimits", "decode", "decode_all", "probe", "raw_bytes"]
