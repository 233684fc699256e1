"""Flags that the demo, the comparison and the recipes share: the text, and the training that all methods share."""

from __future__ import annotations

import argparse

from .data import Text, load_text
from .model import ModelSettings
from .training import Settings

__all__ = ["add_training_arguments", "settings_of", "text_of"]


def add_training_arguments(parser: argparse.ArgumentParser, settings: Settings) -> None:
    """Add the flags; `settings` holds the defaults."""
    model = settings.model
    text = parser.add_argument_group("text")
    text.add_argument("--text", metavar="PATH", help="file or folder (default: the Python standard library's *.py)")
    text.add_argument("--data", metavar="hf:NAME", help="Hugging Face dataset with a column 'text'")
    training = parser.add_argument_group("training, the same for all methods")
    training.add_argument("--workers", type=int, default=2, help="local processes, one torch thread each")
    training.add_argument("--steps", type=int, default=settings.steps, help="inner steps")
    training.add_argument("--batch", type=int, default=settings.batch, help="sequences per worker and step")
    training.add_argument("--context", type=int, default=model.context, help="bytes per sequence")
    training.add_argument("--width", type=int, default=model.width, help="channels of the transformer")
    training.add_argument("--depth", type=int, default=model.depth, help="blocks of the transformer")
    training.add_argument("--heads", type=int, default=model.heads, help="attention heads")
    training.add_argument("--lr", type=float, default=settings.lr, help="highest inner learning rate")
    training.add_argument("--lr-warmup", type=int, default=settings.lr_warmup, help="steps of rising learning rate")
    training.add_argument("--evaluations", type=int, default=settings.evaluations, help="validations per run")
    training.add_argument(
        "--validation-windows", type=int, default=settings.validation_windows, help="sequences per validation"
    )
    training.add_argument("--seed", type=int, default=settings.seed, help="first seed")


def settings_of(options: argparse.Namespace, seed: int) -> Settings:
    """What the flags say."""
    return Settings(
        model=ModelSettings(options.width, options.depth, options.heads, options.context),
        steps=options.steps,
        batch=options.batch,
        lr=options.lr,
        lr_warmup=options.lr_warmup,
        evaluations=options.evaluations,
        validation_windows=options.validation_windows,
        seed=seed,
    )


def text_of(options: argparse.Namespace) -> Text:
    """The text that the flags name."""
    if not (options.data is None or options.data.startswith("hf:")):
        raise ValueError(f"--data must be hf:NAME but is {options.data!r}")
    return load_text(options.text, None if options.data is None else options.data[3:])
