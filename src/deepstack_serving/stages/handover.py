"""What leaves a stage's process: large features stay on their GPU, everything else goes as host tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deepstack_serving.wire import is_forwarded


def ready_to_send(results: Mapping[str, torch.Tensor], gpu_tensor_bytes: int) -> dict[str, torch.Tensor]:
    """The same tensors, contiguous, with their values in place: each stream that computes them is waited for once.

    A tensor stays on its GPU when the orchestrator forwards it unread and it has `gpu_tensor_bytes` or more. No copy is
    made of it: the caller hands over tensors that nothing writes to any more. Empty ones always go by the host.
    """
    sent: dict[str, torch.Tensor] = {}
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for name, result in results.items():
        tensor = result.detach().contiguous()
        if tensor.is_cuda:
            streams[tensor.device] = torch.cuda.current_stream(tensor.device)
            if not (is_forwarded(name) and tensor.nbytes >= max(gpu_tensor_bytes, 1)):
                tensor = tensor.to("cpu", non_blocking=True)  # into pinned memory, which torch keeps for the next time
        sent[name] = tensor
    for stream in streams.values():
        stream.synchronize()
    return sent


def count_arrivals(counts: dict[str, int], inputs: Mapping[str, object]) -> None:
    """Add one call to the counts by input tensor and device, such as 'ds_0 cuda:0'."""
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            key = f"{name} {value.device}"
            counts[key] = counts.get(key, 0) + 1
