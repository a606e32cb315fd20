"""One call to a language stage: the packed tensors, checked against the wire and against each other.

Everything that a caller can get wrong is refused here, with the tensor's name, before the stage writes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from deepstack_serving.checkpoint import TRITON_DTYPES
from deepstack_serving.errors import WireError, shown
from deepstack_serving.injection import StagePlan
from deepstack_serving.stages.burst_call import ONE_STEP, Burst, burst_of, check_burst, check_link
from deepstack_serving.wire import EAGER, SAMPLING, FeatureContract, ModelInterface, check_tensors, feature_inputs

Tensors = Mapping[str, torch.Tensor]

DTYPES = {
    **{name: dtype for dtype, name in TRITON_DTYPES.items()},
    "INT64": torch.int64,
    "INT32": torch.int32,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class LanguageCall:
    """Checked tensors of one call; see wire.py for their shapes."""

    tensors: Tensors
    query_lengths: list[int]
    context_lengths: list[int]
    block_tables: torch.Tensor | None
    features: Tensors
    eager: bool = False  # this call must not replay a graph
    burst: Burst = ONE_STEP
    continues: bool = False  # the decode step after this stage's last one, of the same sequences

    @property
    def rows(self) -> int:
        """Packed rows, of all sequences together."""
        return self.tensors["position_ids"].shape[1]

    @property
    def has_images(self) -> bool:
        return bool(self.features)


def parse_call(
    tensors: Tensors,
    interface: ModelInterface,
    contract: FeatureContract,
    plan: StagePlan,
    blocks: int,
    block_size: int,
) -> LanguageCall:
    """Raises WireError naming the first tensor that is wrong."""
    dtypes = {name: _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)) for name, tensor in tensors.items()}
    check_tensors(interface.inputs, tensors, dtypes)
    queries, contexts = tensors["query_lengths"].tolist(), tensors["context_lengths"].tolist()
    rows = tensors["position_ids"].shape[1]
    _check_lengths(queries, contexts, rows)
    burst = burst_of(tensors)
    entering = "input_ids" if plan.is_first else "hidden_states"
    if not burst.is_linked and len(tensors[entering]) != rows:
        raise WireError(f"tensor {entering!r} has {len(tensors[entering])} rows, 'position_ids' has {rows}")
    tables = _block_tables(tensors, queries, [context + burst.steps - 1 for context in contexts], blocks, block_size)
    names = [spec.name for spec in feature_inputs(contract, plan)]
    features = _features(tensors, names, rows)
    if plan.is_last:
        _check_sampling(tensors, rows)
    if burst.steps > 1:
        check_burst(tensors, plan, rows, len(queries), stateless=tables is None)
    if burst.is_linked:
        check_link(tensors, plan, rows, has_features=bool(features))
    eager = EAGER.name in tensors and bool(tensors[EAGER.name])
    return LanguageCall(tensors, queries, contexts, tables, features, eager, burst)


def check_token_ids(call: LanguageCall, name: str, vocabulary: int) -> None:
    """A token that the embedding does not have would end a CUDA process, not only the call."""
    ids = call.tensors.get(name)
    if ids is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise WireError(f"tensor {name!r} names a token outside 0 to {vocabulary - 1}")


def check_placeholders(call: LanguageCall, placeholder_ids: Sequence[int]) -> None:
    """In a prompt, the rows with a placeholder id and 'image_rows' must be the same: no image may get lost.

    A single row that continues a sequence is left out: a model may generate the placeholder id, which binds no image.
    """
    ids = call.tensors["input_ids"]
    is_placeholder = torch.isin(ids, torch.tensor(placeholder_ids, dtype=ids.dtype, device=ids.device))
    is_image = is_placeholder.clone()
    if is_image.any():
        lengths = zip(call.query_lengths, call.context_lengths, strict=True)
        in_prompt = torch.tensor([query > 1 or query == context for query, context in lengths])
        is_image &= in_prompt.repeat_interleave(torch.tensor(call.query_lengths))
    mapped = torch.zeros_like(is_image)
    if call.has_images:
        mapped[call.tensors["image_rows"]] = True
    lost = is_image & ~mapped
    if lost.any() or (mapped & ~is_placeholder).any():
        raise WireError(
            f"tensor 'image_rows' maps {int(mapped.sum())} rows, but the prompts of this call hold "
            f"{int(is_image.sum())} image tokens, or other rows"
        )


def _check_lengths(queries: list[int], contexts: list[int], rows: int) -> None:
    if len(queries) != len(contexts):
        raise WireError(f"'query_lengths' has {len(queries)} sequences, 'context_lengths' has {len(contexts)}")
    if any(query < 1 for query in queries) or sum(queries) != rows:
        raise WireError(
            f"tensor 'query_lengths' is {shown(queries)}; each must be at least 1 and their sum the {rows} rows"
        )
    if any(context < query for query, context in zip(queries, contexts, strict=True)):
        raise WireError(
            f"tensor 'context_lengths' is {shown(contexts)}; none may be below its query length {shown(queries)}"
        )


def _block_tables(
    tensors: Tensors, queries: list[int], contexts: list[int], blocks: int, block_size: int
) -> torch.Tensor | None:
    tables = tensors.get("block_tables")
    if tables is None or tables.shape[1] == 0:
        if queries != tensors["context_lengths"].tolist():
            raise WireError("a call without 'block_tables' is stateless: 'context_lengths' must equal 'query_lengths'")
        return None
    if len(tables) != len(queries):
        raise WireError(f"tensor 'block_tables' has {len(tables)} rows for {len(queries)} sequences")
    needed = -(-torch.tensor(contexts) // block_size)
    is_used = torch.arange(tables.shape[1]) < needed[:, None]
    wrong = (needed > tables.shape[1]) | (((tables < 0) | (tables >= blocks)) & is_used).any(1)
    if wrong.any():
        index = int(wrong.int().argmax())
        raise WireError(
            f"tensor 'block_tables' row {index} must name {int(needed[index])} blocks below {blocks} for "
            f"{contexts[index]} tokens"
        )
    return tables


def _features(tensors: Tensors, names: list[str], rows: int) -> dict[str, torch.Tensor]:
    present = [name for name in names if name in tensors]
    image_rows, feature_rows = tensors.get("image_rows"), tensors.get("feature_rows")
    if image_rows is None or feature_rows is None or len(image_rows) == 0:
        if present or (image_rows is None) != (feature_rows is None):
            raise WireError(f"{present or ['image_rows or feature_rows']} came without the rows that map them")
        return {}
    for name in names:
        if name not in tensors:
            raise WireError(f"tensor {name!r} is missing: the call has {len(image_rows)} image rows")
    features = {name: tensors[name] for name in names}
    lengths = {name: len(tensor) for name, tensor in features.items()}
    if len(set(lengths.values())) != 1:
        raise WireError(f"feature tensors must have the same number of rows, got {lengths}")
    if len(image_rows) != len(feature_rows) or len(torch.unique(image_rows)) != len(image_rows):
        raise WireError("'image_rows' must be distinct, and 'feature_rows' of the same length")
    _check_range("image_rows", image_rows, rows)
    _check_range("feature_rows", feature_rows, next(iter(lengths.values())))
    return features


def _check_sampling(tensors: Tensors, rows: int) -> None:
    samples = len(tensors["sample_rows"])
    _check_range("sample_rows", tensors["sample_rows"], rows)
    names = [spec.name for spec in SAMPLING]
    present = [name for name in names if name in tensors]
    if present and present != names:
        raise WireError(f"sampling tensors come all or none; got {present} of {names}")
    for name in (*present, *(["forced_ids"] if "forced_ids" in tensors else [])):
        if len(tensors[name]) != samples:
            raise WireError(f"tensor {name!r} has {len(tensors[name])} rows for {samples} 'sample_rows'")


def _check_range(name: str, rows: torch.Tensor, limit: int) -> None:
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= limit):
        raise WireError(f"tensor {name!r} names a row outside 0 to {limit - 1}")
