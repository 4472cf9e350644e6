"""Weight files read and written by real ranks, against transformers and safetensors in one process."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from large_cases import PRESETS, Layers, Odd, differing, ids, llama, loss_of, on_meta, refusal, rows, t5
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

BUILDS = {"odd": Odd, "layers": Layers, "llama": llama, "t5": t5}
SMALL_FILES = "20KB"


@contextmanager
def folder(fill: Callable[[Path], Any] = lambda _: None) -> Iterator[Path]:
    """A folder shared by all ranks, which rank 0 fills."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made, src=0)
    path = Path(made[0])
    if dist.get_rank() == 0:
        fill(path)
    dist.barrier()
    try:
        yield path
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)


def built(name: str, seed: int = 21) -> nn.Module:
    torch.manual_seed(seed)
    return BUILDS[name]()


def saved(model: nn.Module) -> Callable[[Path], Any]:
    """Files as other libraries write them: several with an index, or a single one."""
    if isinstance(model, transformers.PreTrainedModel):
        return lambda path: model.save_pretrained(path, max_shard_size=SMALL_FILES)
    return lambda path: save_model(model, str(path / "model.safetensors"))


def read_into_places(name: str, preset: str) -> dict[str, Any]:
    """Loading into a model on the meta device; what the files lack is initialised by the constructor."""
    alone, inputs = built(name), ids() if name in ("llama", "t5") else rows()
    model = on_meta(name, preset)
    with folder(saved(alone)) as path:
        files = len(list(path.glob("*.safetensors")))
        read_bytes = autopar.load_weights(model, path)
    waiting = [n for n, t in model.named_parameters() if t.is_meta]
    autopar.materialise(model, BUILDS[name] if name == "odd" else None)
    differ = differing(model, alone)
    loss = loss_of(model, inputs)
    loss.backward()
    size_bytes = sum(p.numel() * p.element_size() for p in (*alone.parameters(), *alone.buffers()))
    return {
        "differing": differ,
        "waiting": waiting,
        "files": files,
        "share": read_bytes / size_bytes,
        "loss_error": abs(loss.item() - loss_of(alone, inputs).item()),
    }


def read_again(preset: str) -> list[str]:
    """Loading into a model that has values; its parameters, and the optimizer that refers to them, stay the same."""
    model = on_meta("layers", preset)
    autopar.materialise(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = built("layers", 22)
    before = list(model.parameters())
    with folder(saved(alone)) as path:
        autopar.load_weights(model, path)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    found = differing(model, alone)
    loss_of(model, rows()).backward()
    optimizer.step()
    return found


def pretrained(preset: str) -> dict[str, Any]:
    """Loading a folder of transformers in one call, against transformers' own loading."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with folder(saved(built("llama"))) as path:
        model = autopar.from_pretrained(path, ids(), mesh, constraints=preset)
        alone = transformers.LlamaForCausalLM.from_pretrained(path)
    loss, right = loss_of(model, ids()), loss_of(alone, ids())
    kinds = (type(model).__name__, model.training, type(model.generation_config).__name__)
    return {"differing": differing(model, alone), "loss_error": abs(loss.item() - right.item()), "kinds": kinds}


def pretrained_without_a_head() -> dict[str, Any]:
    """Files of a base model in bf16 determine the dtype; a missing head is an error, or gets initial values."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base, labelled = built("llama").model.bfloat16(), "LlamaForTokenClassification"
    with folder(saved(base)) as path, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = autopar.from_pretrained(path, ids(), mesh, architecture="LlamaForCausalLM", constraints="fsdp")
        alone = transformers.LlamaForCausalLM.from_pretrained(path)
        strict = refusal(lambda: autopar.from_pretrained(path, ids(), mesh, architecture=labelled))
        headed = autopar.from_pretrained(path, ids(), mesh, architecture=labelled, strict=False)
    score = headed.get_parameter("score.weight")
    return {
        "differing": differing(model, alone),
        "dtypes": sorted({str(p.dtype) for p in (*model.parameters(), *headed.parameters())}),
        "strict": strict,
        "told": [str(w.message) for w in told if str(w.message).startswith("the files do not hold 'score")],
        "head": 0.005 < score.full_tensor().std().item() < 0.05,  # type: ignore[operator]
    }


def exported(name: str, preset: str) -> dict[str, Any]:
    """The exported files, read into a plain model by transformers or safetensors."""
    model = on_meta(name, preset)
    torch.manual_seed(31)
    autopar.materialise(model, BUILDS[name] if name == "odd" else None)
    with folder() as path:
        autopar.export_full_state(model, path, largest_file=SMALL_FILES)
        dist.barrier()
        several = sorted(file.name for file in path.iterdir())
        held = {key: tensor for file in path.glob("*.safetensors") for key, tensor in load_file(file).items()}
        paths = autopar.export_full_state(model, path)
        dist.barrier()
        one = sorted(file.name for file in path.iterdir())
        if name in ("llama", "t5"):
            again: nn.Module = type(built(name)).from_pretrained(path)  # type: ignore[attr-defined]
        else:
            again = built(name, 5)
            load_model(again, str(path / "model.safetensors"))
        whole = load_file(paths[0])
    return {
        "differing": differing(model, again),
        "several": several,
        "one": one,
        "alike": held.keys() == whole.keys() and all(torch.equal(held[key], whole[key]) for key in whole),
        "larger_than_asked": [k for k, t in held.items() if t.nbytes > 20_000],
    }


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=12,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config)  # type: ignore[no-any-return]


def experts_one_by_one(preset: str) -> dict[str, Any]:
    """Files with one tensor for each expert, for a model that stacks them; and the files that we write."""
    torch.manual_seed(4)
    alone, mesh = mixtral(), init_device_mesh("cpu", (dist.get_world_size(),))
    with folder(lambda path: alone.save_pretrained(path)) as path:
        held = load_file(path / "model.safetensors")
        model = autopar.from_pretrained(path, ids(), mesh, constraints=preset)
    with folder() as path:
        autopar.export_full_state(model, path)
        dist.barrier()
        again = transformers.MixtralForCausalLM.from_pretrained(path)
    return {
        "one_by_one": sum("experts" in name for name in held),
        "differing": differing(model, alone) + differing(model, again),
        "loss_error": abs(loss_of(model, ids()).item() - loss_of(alone, ids()).item()),
    }


def exported_in_another_dtype() -> dict[str, Any]:
    model = on_meta("llama", "fsdp")
    torch.manual_seed(31)
    autopar.materialise(model)
    with folder() as path:
        autopar.export_full_state(model, path, dtype=torch.bfloat16)
        dist.barrier()
        again = transformers.LlamaForCausalLM.from_pretrained(path)
    torch.manual_seed(31)
    right = dict(llama().named_parameters())
    differ = [name for name, p in again.named_parameters() if not torch.equal(p, right[name].bfloat16())]
    return {"dtype": str(again.dtype), "differing": differ}


# -- files that cannot be read --------------------------------------------------------------------------------


def _changed(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    def fill(path: Path) -> None:
        state = {k: v.clone() for k, v in built("llama").state_dict().items() if k != "lm_head.weight"}
        change(state)
        save_file(state, path / "model.safetensors")

    return fill


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


def _damaged(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"no weights at all")


def _index_of_nothing(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: "model-9.safetensors"}}))


def _wrong_index(path: Path) -> None:
    _changed(lambda state: None)(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"other": "model.safetensors"}}))


REFUSED: dict[str, Callable[[Path], Any]] = {
    "missing": _changed(lambda state: state.pop(NORM)),
    "unexpected": _changed(lambda state: state.update(more=torch.ones(2))),
    "shape": _changed(lambda state: state.update({NORM: torch.ones(31)})),
    "numbers": _changed(lambda state: state.update({NORM: torch.ones(32, dtype=torch.int32)})),
    "tied": _changed(lambda state: state.update({"lm_head.weight": state[EMBEDDING] + 1})),
    "damaged": _damaged,
    "index_of_nothing": _index_of_nothing,
    "wrong_index": _wrong_index,
    "nothing": lambda path: None,
}


def refused(kind: str) -> str:
    model = on_meta("llama")
    with folder(REFUSED[kind]) as path:
        return refusal(lambda: autopar.load_weights(model, path))


def one_rank_sees_no_folder() -> str:
    model = on_meta("llama")
    with folder(saved(built("llama"))) as path:
        return refusal(lambda: autopar.load_weights(model, path if dist.get_rank() == 0 else path / "not"))


def one_rank_sees_no_pretrained() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with folder(saved(built("llama"))) as path:
        mine = path if dist.get_rank() == 0 else path / "not"
        return refusal(lambda: autopar.from_pretrained(mine, ids(), mesh))


def cannot_be_written() -> str:
    model = on_meta("layers")
    autopar.materialise(model)
    with folder(lambda path: (path / "file").write_text("")) as path:
        return refusal(lambda: autopar.export_full_state(model, path / "file" / "model"))


def not_strict() -> dict[str, Any]:
    """Existing entries are loaded, missing ones keep waiting, with a single warning."""
    model = on_meta("llama")
    with folder(REFUSED["missing"]) as path, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        autopar.load_weights(model, path, strict=False)
    waiting = [n for n, t in model.named_parameters() if t.is_meta]
    return {"told": [str(w.message) for w in told if "files" in str(w.message)], "waiting": waiting}


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {f"read-{name}-{preset}": partial(read_into_places, name, preset) for name in BUILDS for preset in PRESETS}
    | {f"read_again-{preset}": partial(read_again, preset) for preset in PRESETS}
    | {f"pretrained-{preset}": partial(pretrained, preset) for preset in PRESETS}
    | {f"exported-{name}": partial(exported, name, preset) for name, preset in zip(BUILDS, (*PRESETS, "fsdp"))}  # noqa: B905
    | {f"experts-{preset}": partial(experts_one_by_one, preset) for preset in ("fsdp", "tp")}
    | {f"refused-{kind}": partial(refused, kind) for kind in REFUSED}
    | {
        case.__name__: case
        for case in (
            pretrained_without_a_head,
            exported_in_another_dtype,
            one_rank_sees_no_folder,
            one_rank_sees_no_pretrained,
            cannot_be_written,
            not_strict,
        )
    }
}
