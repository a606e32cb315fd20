"""Training can be cut off and taken up again; data come from where they are asked for."""

from __future__ import annotations

import itertools
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from demo.architectures import ARCHITECTURES, architecture_of
from demo.backups import FILE_BYTES, Progress, load_backup, save_backup
from demo.digits import load_split, write_digits
from demo.folders import CHECKPOINTS
from demo.prefetch import REUSED, fetch_ahead


class Numbers(NamedTuple):
    """A batch."""

    values: Tensor


def learner(seed: int) -> tuple[list[nn.Parameter], torch.optim.AdamW]:
    torch.manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(1024, 3000))]
    return parameters, torch.optim.AdamW(parameters, lr=0.1, fused=False)


def step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    optimizer.step()


def write_checkpoint(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def test_a_resumed_run_continues_as_if_nothing_had_been(tmp_path: Path) -> None:
    parameters, optimizer = learner(1)
    for _ in range(3):
        step(parameters, optimizer)
    save_backup(tmp_path, write_checkpoint, parameters, optimizer, Progress(3, 1.5, 12))
    again, other = learner(2)
    assert load_backup(tmp_path, again, other) == Progress(3, 1.5, 12)
    assert all(torch.equal(one, two) for one, two in zip(parameters, again, strict=True))
    step(parameters, optimizer)
    step(again, other)
    for one, two in zip(parameters, again, strict=True):
        torch.testing.assert_close(one, two, atol=5e-3, rtol=0)  # moments are kept as bfloat16


def test_a_backup_is_a_checkpoint_and_files_of_limited_size(tmp_path: Path) -> None:
    parameters, optimizer = learner(1)
    step(parameters, optimizer)
    for steps in (1, 2):
        save_backup(tmp_path, write_checkpoint, parameters, optimizer, Progress(steps))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint.tar", "state-0.safetensors", "state-1.safetensors"]
    assert all(path.stat().st_size < FILE_BYTES + 100_000 for path in tmp_path.iterdir())
    with tarfile.open(tmp_path / "checkpoint.tar") as archive:
        assert archive.getnames() == ["config.json"]


def test_files_of_different_moments_are_refused(tmp_path: Path) -> None:
    parameters, optimizer = learner(1)
    step(parameters, optimizer)
    for folder, steps in (("old", 1), ("new", 2)):
        save_backup(tmp_path / folder, write_checkpoint, parameters, optimizer, Progress(steps))
    (tmp_path / "old" / "state-1.safetensors").replace(tmp_path / "new" / "state-1.safetensors")
    with pytest.raises(ValueError, match="of different moments"):
        load_backup(tmp_path / "new", parameters, optimizer)


def test_a_backup_of_another_model_is_refused(tmp_path: Path) -> None:
    parameters, optimizer = learner(1)
    step(parameters, optimizer)
    save_backup(tmp_path, write_checkpoint, parameters, optimizer, Progress())
    with pytest.raises(ValueError, match="6 tensors, but this model and its probes have 3"):
        load_backup(tmp_path, parameters[:1], optimizer)


def test_batches_come_in_order_and_an_error_of_their_source_is_raised() -> None:
    def source() -> Iterator[Numbers]:
        yield from (Numbers(torch.tensor(number)) for number in range(3))
        raise ValueError("torn")

    fetched = fetch_ahead(source())
    assert [int(batch.values) for batch in itertools.islice(fetched, 3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="torn"):
        next(fetched)


def test_reuse_fills_the_time_until_the_next_batch() -> None:
    """The source ends when it has been outrun; every batch comes in order, recent ones again in between."""
    outrun = Event()

    def source() -> Iterator[Numbers]:
        yield from (Numbers(torch.tensor(number)) for number in range(REUSED))
        outrun.wait(60)
        yield Numbers(torch.tensor(REUSED))

    seen: list[int] = []
    for batch in fetch_ahead(source(), reuse=True):
        seen.append(int(batch.values))
        if len(seen) >= REUSED + 10:
            outrun.set()
    first = list(dict.fromkeys(seen))
    assert first == list(range(REUSED + 1))
    assert len(seen) >= REUSED + 10


def test_digits_from_a_file_are_those_of_scikit_learn(tmp_path: Path) -> None:
    write_digits(tmp_path / "digits.npz")
    for stored, known in zip(
        vars(load_split(tmp_path / "digits.npz")).values(), vars(load_split()).values(), strict=True
    ):
        assert np.array_equal(stored.pixels, known.pixels)
        assert np.array_equal(stored.rows, known.rows)


def test_a_folder_tells_its_architecture(tmp_path: Path) -> None:
    assert architecture_of(CHECKPOINTS["qwen"]) is ARCHITECTURES["qwen"]
    assert ARCHITECTURES.keys() == CHECKPOINTS.keys()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="'llama'; known are qwen3_vl, granite4_vision"):
        architecture_of(tmp_path)
