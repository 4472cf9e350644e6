"""The trace takes the same path as eager, and the graph gives the model's results, for small models of the zoo.

Slow tests cover whole families; models left out (no small config builds or runs, or too large) are counted.
"""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
import transformers
from eager_path import EagerCalls, difference, graph_calls
from small_zoo import LISTS, inputs_of, padded, small
from tiny_models import run

from autopar.errors import InputError
from autopar.tracing import UnknownDataError, known, trace
from autopar.tracing.set_order import sets_in_order

NAMES = (
    "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM",
    "MixtralForCausalLM", "OPTForCausalLM", "PhiForCausalLM", "GPTNeoXForCausalLM", "DeepseekV3ForCausalLM",
    "BertForMaskedLM", "RobertaForSequenceClassification", "DistilBertForMaskedLM", "ModernBertForMaskedLM",
    "T5ForConditionalGeneration", "T5Gemma2ForConditionalGeneration", "BartForConditionalGeneration",
    "ViTForImageClassification", "BeitForImageClassification", "ConvNextForImageClassification",
)  # fmt: skip

# A custom autograd function is one node with its own backward; eager runs the functions inside it.
CUSTOM = {
    "BloomForCausalLM", "BloomForSequenceClassification", "PhimoeForCausalLM", "PhimoeForSequenceClassification",
    "RecurrentGemmaForCausalLM", "YosoForMaskedLM", "YosoForSequenceClassification",
}  # fmt: skip
# These look for padding in their ids or in shifted labels, so eager's path is that of known ids.
READS_IDS = {"T5GemmaForConditionalGeneration", "T5GemmaForSequenceClassification", "EncoderDecoderModel"}
# Sizes that these compute in tensors are numbers in the graph: their computation is folded.
FOLDED = {"LongformerForMaskedLM", "LongformerForSequenceClassification"}
LARGEST = 30_000_000  # parameters
COMPARED = {  # minimal number of models compared
    "causal-lm": 145, "masked-lm": 40, "seq2seq-lm": 25, "image-classification": 30, "sequence-classification": 85,
}  # fmt: skip


def path(model, inputs, examples):
    """ "", or where the path of a trace on `examples` differs from that of an eager run on `inputs`."""
    graph = trace(model, examples, bias_addition_split=False, remove_inplace=False).graph
    ordered = sets_in_order(model)  # otherwise the process' hashes determine the order of eager's calls
    with torch.random.fork_rng(), ordered, EagerCalls() as eager, eager.experts_as_one(), eager.vmaps_below():
        outputs = model(**inputs)
    return difference(eager.live(outputs), graph_calls(graph))


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_takes_the_path_that_eager_takes(name):
    model = small(name).train()
    inputs = inputs_of(model)
    assert path(model, inputs, inputs) == ""


TEXT = [name for name in NAMES if "Image" not in name]
# Only models that take positions can be given two sequences in a row.
PACKABLE = [
    name for name in TEXT if "position_ids" in inspect.signature(getattr(transformers, name).forward).parameters
]


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in TEXT for form in ("padded", "full")] + [(name, "packed") for name in PACKABLE],
)
def test_so_it_does_where_a_mask_is_known(name, form):
    model = small(name).train()
    inputs = inputs_of(model)
    ids = inputs["input_ids"]
    if form == "packed":  # two sequences in a row
        extra = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]]).expand_as(ids).contiguous()}
    else:
        extra = {"attention_mask": padded(ids) if form == "padded" else torch.ones_like(ids)}
    assert path(model, {**inputs, **extra}, {**inputs, **{k: known(v) for k, v in extra.items()}}) == ""


@pytest.mark.parametrize("name", NAMES)
def test_replay_is_the_model_bit_for_bit(name):
    model = small(name).train()
    inputs = inputs_of(model)
    traced = trace(model, inputs, bias_addition_split=False)
    state = copy.deepcopy(model.state_dict())
    replayed = run(lambda: traced.gm(*traced.bind((), inputs)), model, state)
    for mine, theirs in zip(replayed, run(lambda: model(**inputs), model, state), strict=True):
        assert len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("name", NAMES)
def test_so_it_is_at_another_batch_size_or_the_dim_is_said_to_be_fixed(name):
    model = small(name).eval()
    traced = trace(model, inputs_of(model), bias_addition_split=False, prove_sizes=True)
    other = inputs_of(model, batch=3)
    main = next(iter(other))
    if (main, 0) in traced.inputs.sizes.fixed:
        with pytest.raises(InputError, match=r"\.py:\d+"):
            traced.bind((), other)
        return
    with torch.no_grad():
        mine, theirs = traced.gm(*traced.bind((), other)), model(**other)
    assert torch.equal(mine.logits, theirs.logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", LISTS)
def test_whole_families_take_the_path_that_eager_takes(family):
    entries = LISTS[family].values()
    names = {n for entry in entries for n in (entry if isinstance(entry, (tuple, list)) else (entry,))}
    parted, left_out, compared = {}, {}, 0
    for name in sorted(names - CUSTOM - FOLDED):
        try:
            model = small(name).train()
            inputs = inputs_of(model)
            if sum(p.numel() for p in model.parameters()) > LARGEST:
                raise ValueError("too large")
            with torch.random.fork_rng(), warnings.catch_warnings(action="ignore"):
                model(**inputs)
        except Exception as error:  # the small config is ours, so the library may raise anything
            left_out[name] = f"{type(error).__name__}: {error}"
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                is_known = name in READS_IDS
                found = path(model, inputs, {k: known(v) for k, v in inputs.items()} if is_known else inputs)
        except UnknownDataError as error:  # models that need a leaf; the zoo's table names them
            left_out[name] = str(error)
            continue
        compared += 1
        if found:
            parted[name] = found
    print(f"{family}: {compared} compared, {len(left_out)} left out", *left_out.items(), sep="\n  ")
    assert parted == {}
    assert compared >= COMPARED[family]
