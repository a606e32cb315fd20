"""Settings of one deployment, parsed once into a frozen object that every stage and the orchestrator share.

Sources, later ones win: the defaults below, the TOML file that DEEPSTACK_SETTINGS_FILE names, environment variables
DEEPSTACK_<KEY>. Nothing else in the project reads the environment.
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from deepstack_serving.errors import SettingsError
from deepstack_serving.rules import Rule, ascending, boolean, choice, integer, number

PREFIX = "DEEPSTACK_"
FILE_VARIABLE = f"{PREFIX}SETTINGS_FILE"
_NO_LIMIT = 2**40
LARGEST_MAX_PIXELS = 178_956_970  # Pillow itself refuses anything larger
_COMPILE_CACHE = "~/.cache/deepstack_serving"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def _device(text: str) -> str:
    kind, colon, index = text.partition(":")
    if text in ("auto", "cpu") or (kind == "cuda" and colon and index.isdigit()):
        return text
    raise ValueError(text)


def _devices(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    if any(not (name.strip() and equals) for name, equals, _ in pairs):
        raise ValueError(text)
    return tuple((name.strip(), _device(device.strip())) for name, _, device in pairs)


def _split_points(text: str) -> tuple[int, ...] | None:
    if text == "balanced":
        return None
    points = tuple(int(item) for item in text.split(",") if item.strip())
    if list(points) != sorted(points) or any(point < 0 for point in points):
        raise ValueError(text)
    return points


def _names(text: str) -> tuple[str, ...]:
    return tuple(item.strip().lower() for item in text.split(",") if item.strip())


def _folder(text: str) -> Path:
    path = Path(text)
    if not (path / "config.json").is_file():
        raise ValueError(text)
    return path


def _path(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:  # a user without a home
        raise ValueError(text) from error
    if not path.is_absolute():  # the server runs in a folder of its own, which goes with it
        raise ValueError(text)
    return path


def _compile_cache() -> Path:
    try:
        return _path(_COMPILE_CACHE)
    except ValueError:
        return Path(tempfile.gettempdir()) / "deepstack_serving"


def _setting(rule: Rule, default: Any = MISSING) -> Any:
    return field(metadata={"rule": rule}) if default is MISSING else field(default=default, metadata={"rule": rule})


@dataclass(frozen=True)
class Settings:
    """One deployment. Sizes are in tokens, bytes or pixels and times in seconds, as the names say."""

    checkpoint: Path = _setting(Rule(_folder, "a folder that holds config.json"))
    split_points: tuple[int, ...] | None = _setting(
        Rule(_split_points, "'balanced', or ascending layer numbers separated by commas, one fewer than stages"), None
    )
    device: str = _setting(Rule(_device, "auto, cpu or cuda:<index>"), "auto")
    devices: tuple[tuple[str, str], ...] = _setting(
        Rule(_devices, "<model name>=<device> pairs separated by commas, device as in DEEPSTACK_DEVICE"), ()
    )
    dtype: str = _setting(choice(*DTYPES), "auto")
    merge_adapter: bool = _setting(boolean(), False)
    cpu_threads: int = _setting(integer(0, 1024), 0)

    execution: str = _setting(choice("auto", "eager", "graph"), "auto")
    graph_fallback: bool = _setting(boolean(), False)
    decode_batch_sizes: tuple[int, ...] = _setting(ascending(1, 4096), (1, 2, 4, 8, 16, 32, 64))
    prefill_graph_tokens: tuple[int, ...] = _setting(ascending(1, 65_536), (64, *range(128, 4097, 128)))
    compile: str = _setting(choice("off", "layers", "autotune"), "layers")
    compile_cache_folder: Path = _setting(
        Rule(_path, "a folder by its whole path, which is made if it is not there"), _compile_cache()
    )
    gpu_tensor_bytes: int = _setting(integer(0, _NO_LIMIT), 2**20)
    decode_steps_per_call: int = _setting(integer(0, 64), 0)
    micro_batches: int = _setting(integer(0, 16), 0)
    audit_parameters: bool = _setting(boolean(), False)

    block_size: int = _setting(integer(1, 1024), 64)
    kv_pool_tokens: int = _setting(integer(0, _NO_LIMIT), 0)
    kv_memory_fraction: float = _setting(number(0, 1, exclude_minimum=True), 0.5)

    max_context_length: int = _setting(integer(0, _NO_LIMIT), 0)
    default_max_tokens: int = _setting(integer(1, _NO_LIMIT), 256)
    max_running_requests: int = _setting(integer(1, 4096), 64)
    max_waiting_requests: int = _setting(integer(0, 1_000_000), 1024)
    prefill_token_budget: int = _setting(integer(1, _NO_LIMIT), 2304)
    request_timeout_s: float = _setting(number(0, 86_400, exclude_minimum=True), 600.0)
    startup_timeout_s: float = _setting(number(0, 86_400, exclude_minimum=True), 300.0)

    max_text_bytes: int = _setting(integer(1, _NO_LIMIT), 2**20)
    forwarded_headers: tuple[str, ...] = _setting(Rule(_names, "header names separated by commas"), ())

    max_images_per_request: int = _setting(integer(0, 1024), 16)
    max_image_bytes: int = _setting(integer(1, _NO_LIMIT), 32 * 2**20)
    max_image_pixels: int = _setting(integer(1, LARGEST_MAX_PIXELS), 64_000_000)
    max_videos_per_request: int = _setting(integer(0, 1024), 4)
    max_video_bytes: int = _setting(integer(1, _NO_LIMIT), 128 * 2**20)
    max_video_seconds: float = _setting(number(0, 86_400, exclude_minimum=True), 1200.0)
    max_video_frames: int = _setting(integer(1, 1_000_000), 36_000)
    max_video_pixels: int = _setting(integer(1, _NO_LIMIT), 512 * 2**20)
    vision_cache_bytes: int = _setting(integer(0, _NO_LIMIT), 256 * 2**20)
    decode_threads: int = _setting(integer(1, 256), 4)
    encoder_threads: int = _setting(integer(1, 64), 2)

    def device_of(self, model_name: str) -> str:
        """The device that the settings name for one Triton model: 'auto', 'cpu' or 'cuda:<index>'."""
        return dict(self.devices).get(model_name, self.device)

    def check_devices(self, model_names: Collection[str]) -> None:
        """Raises SettingsError when 'devices' names a model that the repository does not have."""
        unknown = [name for name, _ in self.devices if name not in model_names]
        if unknown:
            raise SettingsError(
                f"setting 'devices' names {', '.join(unknown)}, which the model repository does not have; allowed: "
                f"{', '.join(model_names)}"
            )


RULES: dict[str, Rule] = {item.name: item.metadata["rule"] for item in fields(Settings)}


def parse_settings(values: Mapping[str, str], source: str = "settings") -> Settings:
    """Settings from lower-case keys and their texts. Raises SettingsError naming key, value and what is allowed."""
    for key in values:
        if key not in RULES:
            raise SettingsError(f"unknown setting {key!r} in {source}; known settings: {', '.join(sorted(RULES))}")
    if "checkpoint" not in values:
        raise SettingsError(
            f"setting 'checkpoint' is missing in {source}; set {PREFIX}CHECKPOINT to a checkpoint folder"
        )
    return Settings(**{key: _parse(key, text, source) for key, text in values.items()})


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Settings of this process, from the environment and the file that it names."""
    environment = os.environ if environment is None else environment
    variables = {name: text for name, text in environment.items() if name.startswith(PREFIX) and name != FILE_VARIABLE}
    from_environment = {name.removeprefix(PREFIX).lower(): text for name, text in variables.items()}
    file = environment.get(FILE_VARIABLE)
    return parse_settings({**(_read_file(Path(file)) if file else {}), **from_environment}, _source(file))


def keep_compiled_code(settings: Settings) -> None:
    """Tell torch where compiled code is kept; to be called before the first compilation of a process."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(settings.compile_cache_folder)  # torch takes it from there alone


def spare_gpu_memory() -> None:
    """Let torch's memory on GPUs grow and shrink by pages, so that what loading leaves unused can be given back, and
    let each stream's matrix products have 16 MiB to work in, half of torch's own choice.

    To be called before any is allocated; what the environment says already holds.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:4")


def _parse(key: str, text: str, source: str) -> Any:
    rule = RULES[key]
    try:
        return rule.parse(text.strip())
    except ValueError as error:
        raise SettingsError(f"setting {key!r} has the value {text!r} in {source}; allowed: {rule.allowed}") from error


def _read_file(path: Path) -> dict[str, str]:
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{FILE_VARIABLE} names {str(path)!r}, which cannot be read as TOML: {error}") from error
    return {key: _as_text(value) for key, value in values.items()}


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    if isinstance(value, dict):
        return ",".join(f"{name}={item}" for name, item in value.items())
    return str(value)


def _source(file: str | None) -> str:
    return f"the environment ({PREFIX}*) or {file}" if file else f"the environment ({PREFIX}*)"
