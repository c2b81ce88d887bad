"""Where vLLM kept the flags of `vllm serve` before 0.3x."""

from __future__ import annotations

import argparse


def make_arg_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("model")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--disable-log-stats", action="store_true")
    parser.add_argument("--fault")
    parser.add_argument("--chat-template")
    parser.add_argument("--chat-template-content-format", default="auto")
    parser.add_argument("--disable-uvicorn-access-log", action="store_true")
    return parser
