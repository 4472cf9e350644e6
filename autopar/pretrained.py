"""A model from a folder of transformers, straight onto the mesh: each rank reads its own part of the weights."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar.api import autoparallelize
from autopar.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def from_pretrained(
    folder: str | Path,
    meta_args: Mapping[str, Any],
    device_mesh: DeviceMesh,
    *,
    architecture: str | type[nn.Module] | None = None,
    strict: bool = True,
    **options: Any,
) -> nn.Module:
    """A planned model with the weights of a local folder; called on every rank.

    The folder holds what `save_pretrained` of transformers writes: `config.json` and weights as safetensors. The model
    is built on the meta device, planned, and read from the files (`load_weights`); tensors that they lack, such as
    rotary frequencies, come from its constructor (`materialise`). No rank ever holds the whole model. It is in training
    mode.

    `architecture`: the class, or its name in transformers, not an Auto class (None: the one that the config names).
    `strict`: as in `load_weights`; if False, a head that the files lack gets its initial values. `options`: as in
    `autoparallelize`.

    Raises InputError for a folder, a config or weights that cannot be read; others as `autoparallelize`.
    """
    from autopar.runtime.ranks.agreement import agree
    from autopar.runtime.weights.loading import load_weights
    from autopar.runtime.weights.materialising import materialise

    error: Exception | None = None
    try:
        model = on_meta(Path(folder), architecture)
    except Exception as problem:  # every rank must learn of it before any of them waits for a collective
        error = problem
    agree(torch.device(device_mesh.device_type), {}, error)
    autoparallelize(model, meta_args, device_mesh, **options)
    load_weights(model, folder, strict=strict)
    return materialise(model)


def on_meta(folder: Path, architecture: str | type[nn.Module] | None = None) -> nn.Module:
    """The model that a folder's config describes, on the meta device, in the config's dtype."""
    try:
        import transformers
    except ImportError as error:
        raise InputError("from_pretrained needs the package transformers: pip install 'autopar[examples]'") from error
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is no folder of a model: it holds no config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder / 'config.json'} cannot be read: {error}") from error
    chosen: Any = _class(transformers, config, architecture, folder)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(config, "dtype", None) or before)
    try:
        with torch.device("meta"):
            model: nn.Module = chosen(config)
    finally:
        torch.set_default_dtype(before)
    if (folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.train()


def _class(transformers: Any, config: Any, architecture: str | type[nn.Module] | None, folder: Path) -> Any:
    if isinstance(architecture, type):
        return architecture
    named = architecture or next(iter(config.architectures or ()), None)
    if named is None:
        raise InputError(f'{folder / "config.json"} names no architecture: pass one, architecture="GPT2LMHeadModel"')
    architecture_class = getattr(transformers, named, None)
    if architecture_class is None or not hasattr(architecture_class, "config_class"):
        close = difflib.get_close_matches(named, dir(transformers), n=1)
        raise InputError(
            f"transformers {transformers.__version__} has no architecture {named!r}"
            + (f": did you mean {close[0]}?" if close else "")
        )
    return architecture_class
