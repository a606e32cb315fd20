"""`deepstack chat IMAGE... -p QUESTION`: asks the server about pictures or videos, prints the answer as it comes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import TypeAlias

from deepstack_client.cli.progress import Stopwatch, WaitingNotice
from deepstack_client.client import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S, Client
from deepstack_client.images import ImageSource
from deepstack_client.request import RequestOptions
from deepstack_client.response import Completion
from deepstack_client.streams import Stream
from deepstack_client.transports import transport_for
from deepstack_client.transports.base import Transport

TransportFactory = Callable[[str], Transport]
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def register(subparsers: Subparsers, transport_factory: TransportFactory = transport_for) -> None:
    parser = subparsers.add_parser("chat", help="ask a question about pictures and videos")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help="image file; - reads one from standard input")
    parser.add_argument("--video", action="append", default=[], metavar="FILE", help="video file; may be given again")
    parser.add_argument("--video-fps", type=float, metavar="N", help="frames a second to take of each video")
    parser.add_argument("--video-num-frames", type=int, metavar="N", help="or frames to take of each video")
    parser.add_argument("-p", "--prompt", required=True, metavar="QUESTION")
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="grpc://host:port or http://host:port (%(default)s)")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token each time")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="SECONDS", help="(%(default)g)")
    parser.add_argument("--raw-prompt", action="store_true", help="send the prompt without the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    parser.add_argument("--stats", action="store_true", help="print times to standard error")
    parser.set_defaults(run=lambda arguments: run(arguments, transport_factory))


def run(arguments: argparse.Namespace, transport_factory: TransportFactory) -> int:
    images = [_source(name) for name in arguments.images]
    transport = transport_factory(arguments.address)
    with Client(arguments.address, timeout_s=arguments.timeout, transport=transport) as client:
        stopwatch = Stopwatch()
        with client.stream(arguments.prompt, images, **_options(arguments)) as stream:
            _print_answer(stream, stopwatch, arguments.json)
            if arguments.stats:
                _print_stats(stopwatch, stream.completion())
    return 0


def _source(name: str) -> ImageSource:
    return sys.stdin.buffer.read() if name == "-" else name


def _options(arguments: argparse.Namespace) -> RequestOptions:
    return {
        "videos": arguments.video,
        "video_fps": arguments.video_fps,
        "video_num_frames": arguments.video_num_frames,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "raw_prompt": arguments.raw_prompt,
    }


def _print_answer(stream: Stream, stopwatch: Stopwatch, as_json: bool) -> None:
    with WaitingNotice(sys.stderr) as notice:
        for chunk in stream:
            stopwatch.count(chunk.num_output_tokens)
            if chunk.text:
                notice.stop()
            if not as_json:
                _write(chunk.text)
    _write(json.dumps(dataclasses.asdict(stream.completion())) + "\n" if as_json else "\n")


def _print_stats(stopwatch: Stopwatch, completion: Completion) -> None:
    counts = f"{completion.num_input_tokens} input tokens, finished by {completion.finish_reason}"
    sys.stderr.write(f"{stopwatch.summary()}; {counts}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
