"""Each image's one placeholder becomes as many tokens as it has feature rows; counts that disagree are refused."""

from __future__ import annotations

import pytest

from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.prompt.placeholders import expand_placeholders, text_positions

IMAGE, VIDEO = 9, 8


def test_placeholders_are_expanded_in_order() -> None:
    prompt = expand_placeholders([1, IMAGE, 2, IMAGE, 3], IMAGE, [2, 3])
    assert prompt.input_ids.tolist() == [1, IMAGE, IMAGE, 2, IMAGE, IMAGE, IMAGE, 3]
    assert (prompt.image_rows.tolist(), prompt.image_tokens, prompt.length) == ([1, 2, 4, 5, 6], (2, 3), 8)


def test_features_of_videos_follow_those_of_images() -> None:
    prompt = expand_placeholders([VIDEO, 1, VIDEO, VIDEO, 2, IMAGE, 3, VIDEO], IMAGE, [2], False, VIDEO, [3, 1])
    assert prompt.image_rows.tolist() == [0, 2, 3, 5, 6, 8]
    assert (prompt.feature_rows.tolist(), prompt.video_tokens) == ([2, 3, 4, 0, 1, 5], (3, 1))


@pytest.mark.parametrize("videos", [[], [1], [3]])
def test_other_number_of_video_tokens_is_refused(videos: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match=f"has 2 video tokens, its videos take {sum(videos)}"):
        expand_placeholders([VIDEO, 1, VIDEO], IMAGE, [], False, VIDEO, videos)


def test_text_stays_as_it_is() -> None:
    prompt = expand_placeholders([1, 2, 3], IMAGE, [])
    assert (prompt.input_ids.tolist(), prompt.image_rows.tolist()) == ([1, 2, 3], [])


@pytest.mark.parametrize(("ids", "images"), [([1, IMAGE, 2], []), ([1], [4]), ([IMAGE, 1, IMAGE], [4]), ([], [4])])
def test_other_number_of_images_is_refused_with_both_counts(ids: list[int], images: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match=f"{ids.count(IMAGE)} image placeholders for {len(images)} images"):
        expand_placeholders(ids, IMAGE, images)


def test_placeholders_that_touch_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="touch each other"):
        expand_placeholders([1, IMAGE, IMAGE, 2], IMAGE, [1, 1])


def test_placeholders_that_may_touch_are_expanded_in_order() -> None:
    prompt = expand_placeholders([1, IMAGE, IMAGE, 2], IMAGE, [1, 2], may_touch=True)
    assert (prompt.input_ids.tolist(), prompt.image_tokens) == ([1, IMAGE, IMAGE, IMAGE, 2], (1, 2))


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        expand_placeholders([], IMAGE, [])


def test_text_positions_count_the_tokens_on_every_axis() -> None:
    assert text_positions(expand_placeholders([1, 2], IMAGE, []), 3).tolist() == [[0, 1]] * 3
