"""Settings: sources and their order, every kind of value, and refusals that name key, value and what is allowed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from deepstack_serving import settings as settings_module
from deepstack_serving.errors import SettingsError
from deepstack_serving.settings import FILE_VARIABLE, RULES, Settings, load_settings, parse_settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def parsed(folder: Path, **values: str) -> Settings:
    return parse_settings({"checkpoint": str(folder), **values})


def test_checkpoint_alone_is_enough(folder: Path) -> None:
    assert parsed(folder).checkpoint == folder


def test_settings_are_frozen(folder: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parsed(folder).dtype = "float32"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("split_points", "balanced", None),
        ("split_points", "3", (3,)),
        ("split_points", "0, 2,2", (0, 2, 2)),
        ("split_points", "", ()),
        ("device", "cuda:1", "cuda:1"),
        ("devices", "a=cuda:0, b=cpu", (("a", "cuda:0"), ("b", "cpu"))),
        ("dtype", " bfloat16 ", "bfloat16"),
        ("block_size", "32", 32),
        ("kv_memory_fraction", "0.25", 0.25),
        ("forwarded_headers", "X-Request-Id, traceparent", ("x-request-id", "traceparent")),
    ],
)
def test_value_is_parsed(folder: Path, key: str, text: str, value: object) -> None:
    assert getattr(parsed(folder, **{key: text}), key) == value


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("checkpoint", "/nowhere"),
        ("split_points", "3,1"),
        ("split_points", "-1"),
        ("split_points", "one"),
        ("device", "cuda"),
        ("device", "gpu:0"),
        ("devices", "language_early"),
        ("devices", "language_early=gpu"),
        ("devices", "=cpu"),
        ("dtype", "float64"),
        ("block_size", "0"),
        ("block_size", "1.5"),
        ("block_size", ""),
        ("cpu_threads", "many"),
        ("kv_pool_tokens", "-1"),
        ("kv_memory_fraction", "0"),
        ("kv_memory_fraction", "1.1"),
        ("kv_memory_fraction", "nan"),
        ("request_timeout_s", "inf"),
        ("max_images_per_request", "1e3"),
    ],
)
def test_bad_value_is_refused_with_key_value_and_what_is_allowed(folder: Path, key: str, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings({"checkpoint": str(folder), key: text}, "the test")
    for part in (repr(key), repr(text), "the test", RULES[key].allowed):
        assert part in str(caught.value)


def test_unknown_key_is_refused_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"unknown setting 'block_sise'.*block_size, checkpoint"):
        parsed(folder, block_sise="16")


def test_missing_checkpoint_names_the_variable_to_set() -> None:
    with pytest.raises(SettingsError, match="DEEPSTACK_CHECKPOINT"):
        parse_settings({})


def test_default_of_every_setting_is_allowed_by_its_own_rule(folder: Path) -> None:
    for item in dataclasses.fields(Settings):
        value = getattr(parsed(folder), item.name)
        if isinstance(value, str | int | float):
            assert RULES[item.name].parse(str(value)) == value


def test_environment_is_read_by_prefix(folder: Path) -> None:
    environment = {"DEEPSTACK_CHECKPOINT": str(folder), "DEEPSTACK_BLOCK_SIZE": "8", "OTHER_BLOCK_SIZE": "9"}
    assert load_settings(environment).block_size == 8


def test_unknown_variable_with_the_prefix_is_refused(folder: Path) -> None:
    with pytest.raises(SettingsError, match="'block_sise' in the environment"):
        load_settings({"DEEPSTACK_CHECKPOINT": str(folder), "DEEPSTACK_BLOCK_SISE": "8"})


def test_environment_overrules_the_file(folder: Path) -> None:
    file = folder / "settings.toml"
    file.write_text(f'checkpoint = "{folder}"\nblock_size = 4\nsplit_points = [1, 2]\n[devices]\na = "cpu"\n')
    settings = load_settings({FILE_VARIABLE: str(file), "DEEPSTACK_BLOCK_SIZE": "8"})
    assert (settings.block_size, settings.split_points, settings.devices) == (8, (1, 2), (("a", "cpu"),))


def test_bad_value_in_the_file_names_the_file(folder: Path) -> None:
    file = folder / "settings.toml"
    file.write_text("block_size = 0")
    with pytest.raises(SettingsError, match=str(file)):
        load_settings({FILE_VARIABLE: str(file), "DEEPSTACK_CHECKPOINT": str(folder)})


@pytest.mark.parametrize("content", [None, "block_size = ", b"\xff\xfe"])
def test_unreadable_file_is_refused_by_name(tmp_path: Path, content: str | bytes | None) -> None:
    file = tmp_path / "settings.toml"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(SettingsError, match=f"{FILE_VARIABLE} names '{file}'"):
        load_settings({FILE_VARIABLE: str(file)})


def test_device_of_a_model_overrules_the_common_one(folder: Path) -> None:
    settings = parsed(folder, device="cpu", devices="vision_encoder=cuda:1")
    assert (settings.device_of("vision_encoder"), settings.device_of("language_early")) == ("cuda:1", "cpu")


def test_devices_may_name_any_number_of_models(folder: Path) -> None:
    settings = parsed(folder, devices="vision_encoder=cuda:0,language_0=cuda:0,language_1=cuda:1,language_2=cpu")
    settings.check_devices(("vision_encoder", "language_0", "language_1", "language_2", "orchestrator"))
    assert [settings.device_of(f"language_{index}") for index in range(3)] == ["cuda:0", "cuda:1", "cpu"]


def test_device_of_a_model_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"'devices' names language_erly, .* allowed: language_early, language_late"
    ):
        parsed(folder, devices="language_erly=cpu").check_devices(("language_early", "language_late"))


@pytest.mark.parametrize("text", ["cache", "./cache", "~nobody-of-that-name/cache", ""])
def test_a_cache_folder_that_would_be_lost_or_is_nowhere_is_refused(text: str, checkpoint: Path) -> None:
    with pytest.raises(SettingsError, match="'compile_cache_folder' has the value"):
        parse_settings({"checkpoint": str(checkpoint), "compile_cache_folder": text})


def test_without_a_home_compiled_code_is_kept_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "_COMPILE_CACHE", "~nobody-of-that-name/cache")
    assert settings_module._compile_cache().is_absolute()
