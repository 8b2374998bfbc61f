"""Serve a model over HTTP, with OpenAI's interface."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
from importlib.util import find_spec
from pathlib import Path

from .arguments import KEY_VARIABLE
from .errors import UserError, one_line, read_text

NEEDED = ("starlette", "uvicorn", "prometheus_client")


def run(args: argparse.Namespace) -> None:
    """Load the model, then serve until Ctrl-C; requests that run are finished first."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise UserError(f"{', '.join(missing)} not installed: pip install {' '.join(missing)}")
    keys, hosts = api_keys(args.api_key_file), names(args.host)
    if not hosts and not keys:
        raise UserError(
            f"--host {args.host} is open to other machines: give --api-key-file FILE or set {KEY_VARIABLE}, or leave "
            "--host out"
        )
    import uvicorn  # none of these is needed by the other commands

    from ..methods import METHODS
    from ..serve.api import Api
    from ..serve.engine import Engine
    from ..serve.schema import Limits
    from .loading import Models, check_methods

    check_methods("--method", [args.method])
    if not METHODS[args.method].keeps_the_text:
        served = ", ".join(name for name, method in METHODS.items() if method.keeps_the_text)
        raise UserError(
            f"--method: {args.method} verifies under rule {METHODS[args.method].rule}, and only under match is a "
            f"seeded text the same whatever runs beside it: give one of {served}"
        )
    check_address(args.host, args.port)
    models = Models(args)
    with one_line():
        engine = Engine(
            models.target,
            lambda: models.drafter(args.method),
            draft_length=models.draft_length(args.method, batch=args.slots),
            slots=args.slots,
            pages=args.pages,
            page_size=args.page_size,
            budget=args.draft_budget,
        )
    api = Api(
        engine,
        models.tokenizer,
        name=args.name or model_name(args.target),
        queue=args.queue,
        keys=keys,
        hosts=hosts,
        limits=Limits(args.max_body, args.max_choices, args.max_tokens),
        library=args.grammar_library,
    )
    config = uvicorn.Config(
        api.app(),
        host=args.host,
        port=args.port,
        log_level="info",
        timeout_graceful_shutdown=args.drain_seconds,
        server_header=False,
    )
    uvicorn.Server(config).run()


def model_name(target: str) -> str:
    """Name of a folder, or on the Hub, without its owner; the folder may be given as ``.``."""
    return os.path.basename(os.path.abspath(target))


def api_keys(file: Path | None) -> list[str]:
    """Keys of a file, one a line, or of the environment.

    Raises:
        UserError: there is no such file, or no key in it.
    """
    if file is None:
        return [key] if (key := os.environ.get(KEY_VARIABLE, "").strip()) else []
    keys = [line.strip() for line in read_text("--api-key-file", file).splitlines() if line.strip()]
    if not keys:
        raise UserError(f"--api-key-file: {file} has no line with a key")
    return keys


def check_address(host: str, port: int) -> None:
    """Find out before a model is loaded whether the server can listen there.

    Raises:
        UserError: it cannot.
    """
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).split(" (while")[0]
        raise UserError(f"--host {host} --port {port}: {reason}") from error


def names(host: str) -> list[str]:
    """Names of a loopback address, by which alone clients may call it; none: it is open to other machines."""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    return sorted({host, "localhost", "127.0.0.1", "[::1]"}) if is_loopback else []
