"""Weights from and to folders of safetensors files, as transformers reads and writes them."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hp_ep.transformers import checkpoint_sources
from hp_fsdp import load_safetensors, save_safetensors

from .config import BUILT_IN, TransformersConfig
from .options import Options
from .peers import from_rank_0, is_rank_0
from .run_folder import has_weights
from .text import load_tokenizer

KEPT_FILES = ("generation_config.json",)  # copied to the folder of the run, and to exports


def load_weights(model: nn.Module, options: Options, device: torch.device) -> None:
    """Load the folder of ``--init-from`` into a model, if the run starts from it.

    Each rank reads only its own elements.

    Raises:
        hp_fsdp.CheckpointError: The weights are damaged, do not fit the model, or need a conversion
            that cannot be read in slices. Raised on all ranks.
        hp_ep.ExpertConfigError: The configuration says that the weights are quantized.
    """
    if starts_from_weights(options):
        assert options.init_from is not None
        load_safetensors(model, options.init_from, sources=_sources(model, options), device=device)


def keep_files(options: Options) -> None:
    """Copy the `KEPT_FILES` to the folder of the run: of ``--init-from``, or of a resumed run."""
    earlier = options.init_from if options.resume is None else options.resume.parent
    if is_rank_0() and earlier is not None and not options.only_exports:
        _copy_kept(earlier, options.out)


def _copy_kept(source: Path, target: Path) -> None:
    for name in KEPT_FILES:
        if (source / name).exists() and not (target / name).exists():
            shutil.copyfile(source / name, target / name)


def export(model: nn.Module, options: Options) -> None:
    """Write the weights and the configuration to the folder of ``--export``, if it is given.

    Raises:
        hp_fsdp.CheckpointError: A file was not written, on all ranks.
    """
    if options.export is None:
        return
    # A run that was stopped after the export and is started again has made it already.
    if options.resumes_in_place and from_rank_0(has_weights(options.export)):
        return
    save_safetensors(model, options.export, sources=_sources(model, options))
    if not is_rank_0():
        return
    config, dtype = options.model, next(p.dtype for p in model.parameters())
    if isinstance(config, TransformersConfig):
        from transformers import AutoConfig

        library: Any = AutoConfig.for_model(**config.fields)
        library.architectures, library.dtype = [_class_name(model)], dtype
        library.save_pretrained(options.export)
    else:
        fields = {"model_type": BUILT_IN, **asdict(config)}
        (options.export / "config.json").write_text(json.dumps(fields, indent=2))
    tokenizer = load_tokenizer(options.source.tokenizer)
    if tokenizer is not None:
        tokenizer.save_pretrained(options.export)
    resumed = options.resume.parent if options.resume is not None else options.out
    _copy_kept(resumed if options.only_exports else options.out, options.export)
    print(f"exported the weights to {options.export}", flush=True)


def starts_from_weights(options: Options) -> bool:
    """Return whether the model is loaded from a folder, so that it needs no initial values."""
    return options.init_from is not None and options.resume is None


def _sources(model: nn.Module, options: Options) -> Any:
    """Return where parameters are in the files, None if they have the names of the model."""
    return checkpoint_sources(model) if isinstance(options.model, TransformersConfig) else None


def _class_name(model: nn.Module) -> str:
    """Return the name that the class has in transformers; sharding derives another class."""
    classes = [each for each in type(model).__mro__ if each.__module__.startswith("transformers.")]
    return classes[0].__name__
